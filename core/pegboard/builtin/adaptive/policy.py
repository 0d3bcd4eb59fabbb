"""As many drafts as pay: the policy `adaptive`.

Time is worth what it brings when all goes as planned: so many tokens a second. A draft node is worth its
chance to be accepted. Of all rows' nodes the likeliest are verified, as long as they bring more than the
time that they cost would bring otherwise; of those that a drafter might make the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pegboard.builtin.adaptive.acceptance import Calibration, Floats, Ints
from pegboard.builtin.adaptive.drafted import Drafted, drafted
from pegboard.builtin.adaptive.planning import Planner
from pegboard.builtin.adaptive.probing import Probing
from pegboard.builtin.adaptive.rows import RowStates
from pegboard.interfaces.speculation_policy import (
    Choice,
    DraftView,
    SpeculationContext,
    SpeculationPolicy,
    StepCosts,
)

_NOTHING = Choice(0, 0)


class AdaptivePolicy(SpeculationPolicy):
    """Chooses by acceptance and by measured seconds."""

    def __init__(self, context: SpeculationContext) -> None:
        self._most = context.num_speculative_tokens
        self._calibration = Calibration()
        self._rows = RowStates(self._most)
        self._planner = Planner(self._most, self._calibration)
        self._probing = Probing(self._most)

    def choose(self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts) -> list[Choice]:
        if not self._most:
            return [_NOTHING] * len(rows)
        slots = self._rows.slots(rows)
        self._learn(rows, slots)
        holding = [index for index, row in enumerate(rows) if row.num_drafts]
        held = drafted([rows[index] for index in holding], self._most)
        self._planner.see(held, self._rows, slots, holding)
        odds = self._rows.odds.of(slots)
        self._rows.odds.fade(1)
        self._planner.plan(odds, costs)
        verify = np.zeros(len(rows), np.int64)
        if holding and tokens_left > 0:
            verify[holding] = self._worthwhile(rows, holding, held, odds, tokens_left, costs)
        propose = self._planner.ask(odds)
        self._probing.probe(rows, slots, verify, propose, tokens_left, costs, self._planner)
        self._rows.remember(rows, slots, verify, propose, holding, held)
        return list(map(Choice, verify.tolist(), propose.tolist()))

    def _learn(self, rows: Sequence[DraftView], slots: Ints) -> None:
        """Takes the outcome of what was verified last."""
        seen = self._rows.outcome(rows, slots)
        if seen is None:
            return
        self._probing.note(seen, self._planner.rate)
        depths = np.arange(self._most)
        was_tried = depths < seen.tried[:, None]
        row, depth = np.nonzero(was_tried & (seen.classes >= 0))
        classes = seen.classes[row, depth]
        expected = np.zeros(was_tried.shape)
        expected[row, depth] = self._calibration.of(seen.classes)[row, depth]
        self._calibration.note(depth, classes, depth < seen.accepted[row])
        self._rows.odds.note(seen.slots, seen.tried, seen.accepted, expected.sum(axis=1))

    def _worthwhile(
        self,
        rows: Sequence[DraftView],
        holding: list[int],
        held: Drafted,
        odds: Floats,
        tokens_left: int,
        costs: StepCosts,
    ) -> Ints:
        """How many nodes of each row that holds some bring more than they cost."""
        worth = held.worth(self._calibration, odds[holding])
        limit = np.array([rows[index].num_left - 1 for index in holding])
        worth[np.arange(self._most) >= np.minimum(held.counts, limit)[:, None]] = 0.0
        flat = worth.ravel()
        order = np.argsort(-flat, kind="stable")[:tokens_left]
        gain = np.concatenate(([0.0], np.cumsum(flat[order])))
        seconds = self._planner.step_seconds(costs, costs.num_tokens, len(order))
        best = int(np.argmax(gain - self._planner.rate * seconds))
        chosen = order[:best]
        return np.bincount(chosen[flat[chosen] > 0] // self._most, minlength=len(holding))
