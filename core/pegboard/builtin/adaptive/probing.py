"""Now and then more is tried than pays by what is known: what is known may be old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pegboard.builtin.adaptive.acceptance import Ints
from pegboard.builtin.adaptive.planning import Planner
from pegboard.builtin.adaptive.rows import Outcome
from pegboard.interfaces.speculation_policy import DraftView, StepCosts

SHARE = 0.005
"""Part of the time that probes may take."""

_MOST_STEPS = 3.0
"""Time that may be saved up for them, in steps."""


@dataclass(slots=True)
class Probe:
    """A row of which more is tried.

    Attributes:
        seq_id, slot: of the row.
        num_nodes: to try.
        paying: those of them that would have been verified anyway.
        cost_s: seconds spent on the others.
        is_open: whether they are being verified.
    """

    seq_id: int
    slot: int
    num_nodes: int
    paying: int = 0
    cost_s: float = 0.0
    is_open: bool = False
    patience: int = 8


class Probing:
    """Tries one row at a time, and the same row on as long as it goes well."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._saved_s = 0.0
        self._probe: Probe | None = None
        self._last: dict[int, int] = {}
        self._turn = 0

    def note(self, seen: Outcome, rate: float) -> None:
        """Takes the outcome of the last probe."""
        probe = self._probe
        if probe is None or not probe.is_open:
            return
        probe.is_open = False
        found = np.flatnonzero(seen.slots == probe.slot)
        if not len(found):
            self._probe = None
            return
        accepted = int(seen.accepted[found[0]])
        gained = max(0, accepted - probe.paying)
        if gained and rate > 0:
            self._saved_s += min(gained / rate, probe.cost_s)
        probe.cost_s = 0.0
        if accepted < min(probe.num_nodes, probe.paying + 1):
            self._probe = None
        else:
            probe.num_nodes = min(2 * probe.num_nodes, self._most)
            probe.patience = 8

    def probe(
        self,
        rows: Sequence[DraftView],
        slots: Ints,
        verify: Ints,
        propose: Ints,
        tokens_left: int,
        costs: StepCosts,
        planner: Planner,
    ) -> None:
        """Adds what is to be tried to the choice of a step."""
        total = int(verify.sum())
        step_s = costs.step_s(costs.num_tokens + total)
        self._saved_s = min(self._saved_s + SHARE * step_s, _MOST_STEPS * step_s)
        if self._probe is None and self._saved_s > 0:
            self._begin(rows, slots, verify, propose, costs, total)
        probe = self._probe
        if probe is None:
            return
        index = self._find(rows, probe)
        if index is None:
            self._probe = None
            return
        wanted = min(rows[index].num_drafts, probe.num_nodes, rows[index].num_left - 1)
        extra = min(wanted - int(verify[index]), tokens_left - total)
        probe.patience -= 1
        if wanted > 0:
            probe.is_open = True
            probe.paying = int(verify[index])
            if extra > 0:
                cost = costs.step_s(costs.num_tokens + total + extra)
                cost -= costs.step_s(costs.num_tokens + total)
                probe.cost_s += cost
                self._saved_s -= cost
                verify[index] += extra
        elif probe.patience <= 0:
            self._probe = None
            return
        if propose[index] < probe.num_nodes:
            asked = int(propose.sum())
            more = probe.num_nodes - int(propose[index])
            cost = costs.draft_s(asked + more) - costs.draft_s(asked)
            probe.cost_s += cost
            self._saved_s -= cost
            propose[index] = probe.num_nodes

    def _begin(
        self,
        rows: Sequence[DraftView],
        slots: Ints,
        verify: Ints,
        propose: Ints,
        costs: StepCosts,
        total: int,
    ) -> None:
        held = np.array([row.num_drafts for row in rows])
        lacking = np.flatnonzero((verify < held) | (propose < self._most))
        if not len(lacking):
            return
        self._turn += 1
        index = int(lacking[self._turn % len(lacking)])
        num_nodes = min(
            max(1, 2 * int(max(verify[index], propose[index] * (held[index] == 0)))), self._most
        )
        if verify[index] < held[index]:
            num_nodes = min(max(1, 2 * int(verify[index])), self._most)
        asked = int(propose.sum())
        more = max(0, num_nodes - int(propose[index]))
        cost = costs.step_s(costs.num_tokens + total + num_nodes) - costs.step_s(
            costs.num_tokens + total
        )
        cost += costs.draft_s(asked + more) - costs.draft_s(asked)
        if cost <= self._saved_s:
            self._probe = Probe(rows[index].seq_id, int(slots[index]), num_nodes)

    def _find(self, rows: Sequence[DraftView], probe: Probe) -> int | None:
        for index, row in enumerate(rows):
            if row.seq_id == probe.seq_id:
                return index
        return None
