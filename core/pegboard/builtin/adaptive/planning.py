"""How many nodes to ask of the drafter, and what a second is worth."""

from __future__ import annotations

import numpy as np

from pegboard.builtin.adaptive.acceptance import Calibration, Floats, Ints
from pegboard.builtin.adaptive.drafted import Drafted
from pegboard.builtin.adaptive.rows import RowStates
from pegboard.interfaces.speculation_policy import StepCosts

_NUM_RECENT = 64
"""Drafts of late that tell what to expect of the next ones."""

_MOST_A_STEP = 8
"""Drafts of one step that are kept as recent ones."""

_NUM_ODDS = 8
"""Rows are taken together whose odds are alike: so many classes better than all, and as many worse."""

_WINDOW = 10
"""Steps that ask for drafts, which recent drafts are remembered for."""

_FLAT = 0.003
"""Part of the rate that is given away for drafts: among those that are made, steps can choose."""

_PLAN_STEPS = 8
"""Steps that a plan holds for, while there are about as many rows."""


class Planner:
    """Plans for steps like this one, from what drafts of late were worth.

    Attributes:
        rate: tokens a second by the plan; 0: nothing was measured yet.
    """

    def __init__(self, most: int, calibration: Calibration) -> None:
        self.rate = 0.0
        self._most = most
        self._calibration = calibration
        self._price = 0.0
        self._asked = np.full(2 * _NUM_ODDS + 1, most, np.int64)
        self._age = 0
        self._num_rows = 0
        self._num_recent = 0
        shape = (_NUM_RECENT, most)
        self._recent = Drafted(
            counts=np.zeros(_NUM_RECENT, np.int64),
            classes=np.zeros(shape, np.int64),
            num_depths=np.zeros(_NUM_RECENT, np.int64),
            depths=np.zeros(shape, np.int64),
            shares=np.zeros(shape),
        )
        self._is_cut = np.zeros(_NUM_RECENT, np.bool_)
        self._weights = np.zeros(_NUM_RECENT)

    def see(self, held: Drafted, rows: RowStates, slots: Ints, holding: list[int]) -> None:
        """Keeps some of the drafts that were made since the last step, and of the rows that were asked
        for some and got none."""
        asked = rows.asked[slots]
        place = np.full(len(slots), -1)
        place[holding] = np.arange(len(holding))
        some = np.flatnonzero(asked)
        if len(some) > _MOST_A_STEP:
            some = np.roll(some, self._num_recent)[:_MOST_A_STEP]
        if len(some):
            self._weights *= 1 - 1 / _WINDOW
        for index in some.tolist():
            at, of = self._num_recent % _NUM_RECENT, int(place[index])
            self._num_recent += 1
            recent = self._recent
            self._weights[at] = 1.0
            recent.shares[at] = 0.0
            recent.counts[at] = 0
            if of >= 0:
                recent.counts[at] = held.counts[of]
                recent.classes[at] = held.classes[of]
                recent.depths[at] = held.depths[of]
                recent.shares[at] = held.shares[of]
            self._is_cut[at] = recent.counts[at] == asked[index] < self._most

    def plan(self, odds: Floats, costs: StepCosts) -> None:
        """Plans anew where the last plan is old, or was for another number of rows."""
        self._age += 1
        if self._age < _PLAN_STEPS and 8 * abs(len(odds) - self._num_rows) < self._num_rows:
            return
        self._age, self._num_rows = 0, len(odds)
        kinds, num_of_kind = np.unique(_kinds(odds), return_counts=True)
        gains, verified = self._expected(2.0 ** ((kinds - _NUM_ODDS) / 2))
        net = (gains - self._price * verified).ravel()
        many = np.repeat(num_of_kind, self._most)
        order = np.argsort(-net, kind="stable")
        gain = _sums((gains.ravel() * many)[order])
        more = _sums((verified.ravel() * many)[order])
        asked = _sums(many[order].astype(np.float64))
        sizes = np.arange(int(more[-1]) + 2)
        steps = np.interp(more, sizes, self.step_seconds(costs, len(odds), len(sizes) - 1))
        drafting = np.array([costs.draft_s(int(nodes)) for nodes in asked])
        if steps[0] + drafting[0] <= 0:
            return
        # Of what is made, a step may verify less.
        rates = (len(odds) + gain) / (steps + drafting[:, None])
        rates[np.triu_indices(len(gain), 1)] = 0.0
        self.rate = float(rates.max())
        made = int(np.flatnonzero(rates.max(axis=1) >= (1 - _FLAT) * self.rate)[-1])
        best = int(np.argmax(rates[made]))
        chosen = order[:made] // self._most
        self._asked = np.full(len(self._asked), 0)
        self._asked[kinds] = np.bincount(chosen, minlength=len(kinds))
        if _NUM_ODDS not in kinds:  # of rows that nothing is known of
            nearest = int(np.argmin(np.abs(kinds - _NUM_ODDS)))
            self._asked[_NUM_ODDS] = self._asked[kinds[nearest]]
        width = max(1.0, len(odds) / 4)
        ends = np.interp([more[best], more[best] + width], more, steps)
        slope = (ends[1] - ends[0]) / width
        if more[best] + width > more[-1]:
            ahead = costs.step_s(len(odds) + int(more[best] + width) + 1)
            slope = (ahead - steps[best]) / (int(width) + 1)
        self._price = self.rate * max(0.0, float(slope))

    def ask(self, odds: Floats) -> Ints:
        """How many nodes to ask for each row."""
        return self._asked[_kinds(odds)]

    def step_seconds(self, costs: StepCosts, num_tokens: int, num_more: int) -> Floats:
        """Seconds of steps of so many tokens and 0 to `num_more` more."""
        return np.asarray(costs.steps_s(num_tokens, num_tokens + num_more))

    def _expected(self, odds: Floats) -> tuple[Floats, Floats]:
        """Of each node that a row of such odds might be asked for, the acceptances to expect and the share
        that would be verified: [kinds of odds, most]."""
        if not self._num_recent:
            ones = np.ones((len(odds), self._most))
            return ones, ones
        num = min(self._num_recent, _NUM_RECENT)
        worth = self._recent.worth(self._calibration, odds[:, None])[:, :num]
        is_cut = self._is_cut[:num]
        if is_cut.any():
            self._go_on(worth, is_cut, self._recent.counts[:num])
        pays = worth >= max(self._price, 1e-9)
        weights = self._weights[:num] / self._weights[:num].sum()
        return weights @ (worth * pays), weights @ pays

    def _go_on(self, worth: Floats, is_cut: np.ndarray, counts: Ints) -> None:
        """Where fewer nodes were asked for, further ones would have gone on as the last ones did."""
        for node in range(1, self._most):
            unknown = is_cut & (counts <= node)
            before = worth[:, unknown, node - 1]
            above = worth[:, unknown, node - 2] if node > 1 else np.ones_like(before)
            worth[:, unknown, node] = before * before / np.maximum(above, 1e-9)


def _kinds(odds: Floats) -> Ints:
    kinds: Ints = np.clip(np.rint(2 * np.log2(odds)), -_NUM_ODDS, _NUM_ODDS).astype(np.int64)
    return kinds + _NUM_ODDS


def _sums(values: Floats) -> Floats:
    """Of the first 0, 1, 2 ... values."""
    return np.concatenate(([0.0], np.cumsum(values)))
