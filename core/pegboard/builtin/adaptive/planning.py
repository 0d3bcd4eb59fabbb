"""How many nodes to ask of the drafter, and what a second is worth."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pegboard.builtin.adaptive.acceptance import Calibration, Floats, Ints
from pegboard.builtin.adaptive.drafted import Drafted
from pegboard.interfaces.speculation_policy import StepCosts

PLAN_STEPS = 16
"""Steps that a plan holds for, while there are about as many rows; the first ones for fewer."""

_NUM_RECENT = 32
"""Drafts of late that tell what to expect of the next ones."""

_MOST_A_STEP = 4
"""Drafts of one step that are kept as recent ones."""

_WINDOW = 10
"""Steps with drafts that recent ones are remembered for."""

_NUM_ODDS = 8
"""Rows are taken together whose odds are alike: so many classes better than all, and as many worse."""

_LEAST_WORTH = np.array([1e-9, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9])
"""A plan lets steps verify what is worth more than one of these."""

_FIRST_CHANCE = 0.6
"""Chance of a node before there were any."""

_FLAT = 0.003
"""Part of the rate that is given away for drafts: of those that are made, a step may choose."""


class Planner:
    """Plans for steps like this one, from what drafts of late were worth.

    Attributes:
        rate: tokens a second by the plan; 0: nothing was measured yet.
        age: steps since the plan was made.
    """

    def __init__(self, most: int, calibration: Calibration) -> None:
        self.rate = 0.0
        self._most = most
        self._calibration = calibration
        self._asked: Ints = np.full(2 * _NUM_ODDS + 1, most, np.int64)
        self.age = 0
        self._num_rows = self._num_plans = 0
        self._num_seen = 0
        shape = _NUM_RECENT, most
        self._recent = Drafted(
            counts=np.zeros(_NUM_RECENT, np.int64),
            classes=np.zeros(shape, np.int64),
            num_depths=np.zeros(_NUM_RECENT, np.int64),
            depths=np.zeros(shape, np.int64),
            shares=np.zeros(shape),
        )
        self._is_cut = np.zeros(_NUM_RECENT, np.bool_)
        self._weights = np.zeros(_NUM_RECENT)

    def is_due(self, num_rows: int) -> bool:
        """A step of so many rows comes: whether the plan is old, or was for another number."""
        self.age += 1
        is_old = self.age >= min(PLAN_STEPS, self._num_plans + 1)
        return is_old or 8 * abs(num_rows - self._num_rows) >= self._num_rows

    def see(self, drafts: Drafted, asked: Ints, holding: Ints) -> None:
        """Keeps some of the drafts that were made since the last step, and of the rows that were asked
        for some and got none.

        Args:
            asked: int64 [R], of each row.
            holding: int64 [rows with drafts], their indices, ascending.
        """
        (some,) = asked.nonzero()
        if not len(some):
            return
        if len(some) > _MOST_A_STEP:
            some = some[(self._num_seen + np.arange(_MOST_A_STEP)) % len(some)]
        recent = self._recent
        assert recent.depths is not None
        self._weights *= 1 - 1 / _WINDOW
        for index in some.tolist():
            at, place = self._num_seen % _NUM_RECENT, int(holding.searchsorted(index))
            got_none = place == len(holding) or holding[place] != index
            self._num_seen += 1
            self._weights[at] = 1.0
            recent.counts[at] = 0 if got_none else drafts.counts[place]
            self._is_cut[at] = recent.counts[at] == asked[index] < self._most
            if got_none:
                recent.shares[at] = 0.0
                continue
            recent.classes[at] = drafts.classes[place]
            recent.shares[at] = drafts.shares[place]
            recent.depths[at] = (
                np.arange(self._most) if drafts.depths is None else drafts.depths[place]
            )

    def plan(self, odds: Floats, costs: StepCosts) -> None:
        """Plans for steps of rows of these odds: how many nodes of each to ask for, and from which worth on
        they would be verified."""
        self.age, self._num_rows = 0, len(odds)
        self._num_plans += 1
        kinds, num_of_kind = np.unique(_kinds(odds), return_counts=True)
        worth, weights = self._expected(2.0 ** ((kinds - _NUM_ODDS) / 2))
        order = np.argsort(-(weights @ worth).ravel(), kind="stable")
        many = np.repeat(num_of_kind, self._most)[order]
        asked = np.concatenate(([0], np.maximum.accumulate(order % self._most + 1)))
        draft_s = np.array([costs.draft_s(nodes) for nodes in range(self._most + 1)])[asked]
        most_s = costs.steps_s(len(odds), len(odds) * (self._most + 1))
        if most_s[0] + draft_s[0] <= 0:
            return
        pays = worth >= _LEAST_WORTH[:, None, None, None]
        gain = _sums((weights @ (worth * pays)).reshape(len(pays), -1)[:, order] * many)
        more = _sums((weights @ pays).reshape(len(pays), -1)[:, order] * many)
        step_s = np.interp(more, np.arange(len(most_s)), most_s)
        rates = ((len(odds) + gain) / (step_s + draft_s)).max(axis=0)
        self.rate = float(rates.max())
        made = int((rates >= (1 - _FLAT) * self.rate).nonzero()[0][-1])
        self._ask_for(kinds, np.bincount(order[:made] // self._most, minlength=len(kinds)))

    def asked_of(self, odds: Floats) -> Ints:
        """How many nodes to ask for each row of these odds."""
        return self._asked[_kinds(odds)]

    def _ask_for(self, kinds: Ints, numbers: Ints) -> None:
        """So many nodes for rows of each kind; for kinds of which there was no row, as the nearest."""
        every = np.arange(len(self._asked))
        nearest = np.abs(every[:, None] - kinds).argmin(axis=1)
        self._asked = numbers[nearest]

    def _expected(self, odds: Floats) -> tuple[Floats, Floats]:
        """What nodes would be worth, of rows of such odds, if the next drafts were those of late:
        [kinds of odds, drafts, most], and how much each of these drafts counts."""
        if not self._num_seen:
            worth = np.cumprod(np.full(self._most, _FIRST_CHANCE))
            return np.broadcast_to(worth, (len(odds), 1, self._most)), np.ones(1)
        num = min(self._num_seen, _NUM_RECENT)
        worth = self._recent.worth(self._calibration, odds[:, None])
        worth = np.broadcast_to(worth, (len(odds), *worth.shape[-2:]))[:, :num].copy()
        is_cut = self._is_cut[:num]
        if is_cut.any():
            _go_on(worth, is_cut, self._recent.counts[:num])
        return worth, self._weights[:num] / self._weights[:num].sum()


def _go_on(worth: Floats, is_cut: NDArray[np.bool_], counts: Ints) -> None:
    """Where fewer nodes were asked for, further ones would have gone on as the last ones did."""
    for node in range(1, worth.shape[2]):
        unknown = is_cut & (counts <= node)
        before = worth[:, unknown, node - 1]
        above = worth[:, unknown, node - 2] if node > 1 else np.ones_like(before)
        worth[:, unknown, node] = before * before / np.maximum(above, 1e-9)


def _kinds(odds: Floats) -> Ints:
    kinds: Ints = np.rint(2 * np.log2(odds)).astype(np.int64) + _NUM_ODDS
    return np.minimum(np.maximum(kinds, 0), 2 * _NUM_ODDS)


def _sums(values: Floats | Ints) -> Floats:
    """Of the first 0, 1, 2 ... values along the last axis."""
    sums = np.cumsum(values, axis=-1)
    return np.concatenate((np.zeros((*sums.shape[:-1], 1)), sums), axis=-1)
