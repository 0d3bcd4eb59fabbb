"""As many drafts as pay: the policy `adaptive`.

Time is worth what it brings when all goes as planned: so many tokens a second. A draft node is worth its
chance to be accepted. Of all rows' nodes the likeliest are verified, as long as they bring more than the
time that they cost would bring otherwise; of those that a drafter might make the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pegboard.builtin.adaptive.acceptance import Calibration, Floats, Ints, Sharpness
from pegboard.builtin.adaptive.drafted import Drafted, drafted
from pegboard.builtin.adaptive.planning import Planner
from pegboard.builtin.adaptive.probing import Probing
from pegboard.builtin.adaptive.rows import Outcome, RowStates, Shown
from pegboard.builtin.adaptive.sizing import Sizing
from pegboard.interfaces.speculation_policy import (
    Choice,
    DraftView,
    SpeculationContext,
    SpeculationPolicy,
    StepCosts,
)

_LEARN_STEPS = 4
"""Steps whose outcomes are learned from at once, which saves the host's time."""


_LEAST_WORTH = 0.02
"""Chance of a node that is verified. What a node costs is seldom known to be less."""


class AdaptivePolicy(SpeculationPolicy):
    """Chooses by acceptance and by measured seconds."""

    def __init__(self, context: SpeculationContext) -> None:
        self._most = context.num_speculative_tokens
        self._calibration = Calibration(self._most)
        self._sharpness = Sharpness()
        self._rows = RowStates(self._most)
        self._planner = Planner(self._most, self._calibration)
        self._sizing = Sizing()
        self._probing = Probing(self._most)
        self._outcomes: list[Outcome] = []
        self._num_steps = 0
        self._least = 0.0
        self._asked: Ints = np.zeros(0, np.int64)
        self._resting: list[Choice] | None = None
        self._choices = _Choices(self._most + 1)

    def choose(self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts) -> list[Choice]:
        if not self._most or not rows:
            return [Choice(0, 0)] * len(rows)
        self._num_steps += 1
        is_due = self._planner.is_due(len(rows))
        if not is_due and self._rests(rows):
            if self._resting is None:
                self._resting = self._choices.of(self._asked)
            return self._resting
        shown = Shown(rows, self._most)
        slots = self._rows.slots(shown)
        self._learn(shown, slots, is_due)
        return self._choices.of(*self._decide(shown, slots, tokens_left, costs, is_due))

    def _rests(self, rows: Sequence[DraftView]) -> bool:
        """Whether there is nothing to decide, and nothing to learn."""
        return (
            len(rows) == len(self._asked)
            and not self._rows.awaits
            and not self._probing.is_open
            and not any(row.num_drafts and self._is_good(row) for row in rows)
        )

    def _is_good(self, row: DraftView) -> bool:
        """Whether drafts of a row may be worth a closer look."""
        return row.confidences[0] >= self._least or type(row.parents) is not range

    def _decide(
        self, shown: Shown, slots: Ints, tokens_left: int, costs: StepCosts, is_due: bool
    ) -> tuple[Ints, Ints]:
        """Nodes to ask for, and nodes to verify, of each row."""
        (holding,) = (shown.held > 0).nonzero()
        holders = [shown.rows[index] for index in holding.tolist()]
        power = self._sharpness.power
        drafts = drafted(holders, shown.held[holding], self._most, power)
        self._planner.see(drafts, self._rows.asked[slots], holding)
        odds = self._rows.odds.values[slots]
        if is_due:
            self._planner.plan(odds, costs)
            self._least = self._calibration.least(self._price(len(slots), costs), odds.max())
        verify = np.zeros(len(slots), np.int64)
        if len(holding) and tokens_left > 0:
            verify[holding] = self._worthwhile(drafts, odds[holding], tokens_left, costs)
        propose = np.minimum(self._planner.asked_of(odds), np.maximum(shown.limit, 0))
        self._asked, self._resting = propose.copy(), None
        step_s = costs.step_s(costs.num_tokens)
        self._sizing.save(step_s, self._num_steps)
        self._probing.save(step_s, self._num_steps)
        self._num_steps = 0
        self._probing.probe(shown, slots, verify, propose, tokens_left, costs)
        if costs.num_tokens == len(slots):  # no prompt's chunk
            self._sizing.visit(len(slots) + int(verify.sum()))
        self._rows.asked[slots] = propose
        if len(holding):
            self._rows.remember(slots[holding], holders, drafts, verify[holding], power)
        return propose, verify

    def _price(self, num_rows: int, costs: StepCosts) -> float:
        """What a node has to be worth at the least, in a step of so many rows: as much as its time, of as
        many nodes as make it cheapest."""
        seconds = costs.steps_s(num_rows, num_rows * (1 + self._most))
        each_s = (seconds[1:] - seconds[0]) / np.arange(1, len(seconds))
        return self._planner.rate * float(each_s.min())

    def _learn(self, shown: Shown, slots: Ints, is_due: bool) -> None:
        """Takes the outcome of what was verified last."""
        if self._rows.awaits:
            seen = self._rows.outcome(shown, slots)
            if seen is not None:
                self._probing.note(seen, self._planner.rate)
                self._outcomes.append(seen)
        if is_due or self._probing.is_open or len(self._outcomes) >= _LEARN_STEPS:
            for seen in self._outcomes:
                self._learn_from(seen)
            self._outcomes.clear()
        if is_due:
            self._rows.odds.fade(self._planner.age)

    def _learn_from(self, seen: Outcome) -> None:
        was_tried = (np.arange(self._most) < seen.tried[:, None]) & (seen.classes >= 0)
        row, depth = was_tried.nonzero()
        expected = (self._calibration.of(seen.classes) * was_tried).sum(axis=1)
        classes, accepted = seen.classes[row, depth], depth < seen.accepted[row]
        self._calibration.note(depth, classes, accepted)
        self._sharpness.note(classes[seen.is_tree[row]], accepted[seen.is_tree[row]])
        self._rows.odds.note(seen.slots, seen.tried, seen.accepted, expected)

    def _worthwhile(
        self, drafts: Drafted, odds: Floats, tokens_left: int, costs: StepCosts
    ) -> Ints:
        """How many nodes of each row that holds some bring more than they cost."""
        worth = drafts.worth(self._calibration, odds).ravel()
        num_nodes = min(int((worth >= _LEAST_WORTH).sum()), tokens_left)
        order = np.argsort(-worth, kind="stable")[:num_nodes]
        gain = np.concatenate(([0.0], np.cumsum(worth[order])))
        seconds = costs.steps_s(costs.num_tokens, costs.num_tokens + num_nodes)
        best = self._sizing.choose(costs.num_tokens, gain, seconds, self._planner.rate)
        return np.bincount(order[:best] // self._most, minlength=len(drafts.counts))


class _Choices(dict[int, Choice]):
    """Choices that were made once: making them takes longer than finding them."""

    def __init__(self, base: int) -> None:
        super().__init__()
        self._base = base

    def __missing__(self, key: int) -> Choice:
        verify, propose = divmod(key, self._base)
        choice = self[key] = Choice(verify, propose)
        return choice

    def of(self, propose: Ints, verify: Ints | int = 0) -> list[Choice]:
        """The choice for each row."""
        return [self[key] for key in (verify * self._base + propose).tolist()]
