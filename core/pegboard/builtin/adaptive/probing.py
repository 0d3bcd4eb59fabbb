"""Now and then more is tried than pays by what is known: what is known may be old."""

from __future__ import annotations

from dataclasses import dataclass

from pegboard.builtin.adaptive.acceptance import Ints
from pegboard.builtin.adaptive.rows import Outcome, Shown
from pegboard.interfaces.speculation_policy import StepCosts

SHARE = 0.005
"""Part of the time that probes may take, in the long run. One that goes well takes none."""

_MOST_STEPS = 3.0
"""Time that may be saved up for them, in steps."""

_LEAST_COST = 0.05
"""Least cost of a probe, in steps."""

_PATIENCE = 8
"""Steps that a probe waits for drafts."""


@dataclass(slots=True)
class Probe:
    """A row of which more is tried.

    Attributes:
        seq_id, slot: of the row.
        num_nodes: to try.
        num_paying: how many of them would have been verified anyway.
        cost_s: seconds that the others, and drafting them, take.
        waited: steps without drafts.
        is_open: whether their outcome is not known yet.
    """

    seq_id: int
    slot: int
    num_nodes: int
    num_paying: int = 0
    cost_s: float = 0.0
    waited: int = 0
    is_open: bool = False


class Probing:
    """Tries one row at a time; where it goes well the same again, with more nodes.

    Attributes:
        is_open: whether a row is being tried.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._saved_s = 0.0
        self._probe: Probe | None = None
        self._turn = 0

    @property
    def is_open(self) -> bool:
        return self._probe is not None

    def note(self, seen: Outcome, rate: float) -> None:
        """Takes the outcome of the last probe.

        Args:
            rate: tokens a second that time brings otherwise.
        """
        probe = self._probe
        if probe is None or not probe.is_open:
            return
        probe.is_open = False
        (found,) = (seen.slots == probe.slot).nonzero()
        num_accepted = int(seen.accepted[found[0]]) if len(found) else 0
        gained = num_accepted - probe.num_paying
        if gained > 0 and rate > 0:
            self._saved_s += min(gained / rate, probe.cost_s)
        if gained > 0 or num_accepted == probe.num_nodes:
            probe.num_nodes = min(2 * probe.num_nodes, self._most)
            probe.cost_s = 0.0
        else:
            self._probe = None

    def save(self, step_s: float, num_steps: int) -> None:
        """Time has passed, in which steps took about so long."""
        saved_s = self._saved_s + SHARE * step_s * num_steps
        self._saved_s = min(saved_s, _MOST_STEPS * step_s)

    def probe(
        self,
        shown: Shown,
        slots: Ints,
        verify: Ints,
        propose: Ints,
        tokens_left: int,
        costs: StepCosts,
    ) -> None:
        """Adds what is to be tried to what a step verifies and asks for."""
        before = costs.num_tokens + int(verify.sum())
        if self._probe is None and self._saved_s > 0:
            self._begin(shown, slots, verify, propose, costs)
        probe = self._probe
        if probe is None:
            return
        if probe.seq_id not in shown.seq_ids:
            self._probe = None
            return
        index = shown.seq_ids.index(probe.seq_id)
        paying = int(verify[index])
        room = tokens_left - int(verify.sum())
        wanted = min(int(shown.held[index]), probe.num_nodes, paying + room)
        cost_s = 0.0
        if wanted > 0:
            probe.is_open, probe.waited, probe.num_paying = True, 0, min(paying, wanted)
            extra = max(0, wanted - paying)
            cost_s += _more_to_verify(before, extra, costs)
            verify[index] = paying + extra
        else:
            probe.waited += 1
            if probe.waited > _PATIENCE:
                self._probe = None
                return
        wanted = min(probe.num_nodes, int(shown.limit[index]))
        if wanted > propose[index]:
            cost_s += _more_to_draft(propose, wanted, costs)
            propose[index] = wanted
        probe.cost_s += cost_s
        self._saved_s -= cost_s

    def _begin(
        self, shown: Shown, slots: Ints, verify: Ints, propose: Ints, costs: StepCosts
    ) -> None:
        """Chooses a row by turns, if what was saved is enough for it."""
        (lacking,) = ((verify < shown.held) | (propose < shown.limit)).nonzero()
        if not len(lacking):
            return
        self._turn += 1
        index = int(lacking[self._turn % len(lacking)])
        enough = int(verify[index] if shown.held[index] else propose[index])
        num_nodes = min(max(1, 2 * enough), self._most)
        before = costs.num_tokens + int(verify.sum())
        cost_s = _more_to_verify(before, num_nodes, costs)
        cost_s += _more_to_draft(propose, num_nodes, costs)
        if cost_s <= self._saved_s:
            self._probe = Probe(shown.seq_ids[index], int(slots[index]), num_nodes)


def _more_to_verify(num_tokens: int, more: int, costs: StepCosts) -> float:
    """Seconds that it takes to verify so many more. They may seem to be none; lest all steps be probes,
    they are taken to be some."""
    step_s = costs.step_s(num_tokens)
    return max(costs.step_s(num_tokens + more) - step_s, _LEAST_COST * step_s) if more else 0.0


def _more_to_draft(propose: Ints, num_nodes: int, costs: StepCosts) -> float:
    """Seconds that it takes to ask a row for so many nodes, beside what is asked for."""
    asked = int(propose.max())
    return costs.draft_s(max(asked, num_nodes)) - costs.draft_s(asked)
