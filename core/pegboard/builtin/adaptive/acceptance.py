"""How likely drafts are accepted, by what was accepted so far.

A drafter's probabilities may be far off. What counts is how often drafts of such a probability, at such a
depth, were accepted lately: in all rows (`Calibration`), and in the row itself as against all (`RowOdds`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST = 1e-3
"""Neither acceptance nor its contrary is taken to be less likely than that."""

_EDGES = np.array([0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.87, 0.95])
_CENTRES = np.array([0.02, 0.1, 0.22, 0.38, 0.52, 0.68, 0.81, 0.91, 0.98])
"""Classes of a drafter's probabilities: where they end, and what they stand for."""

_NUM_DEPTHS = 8
"""Depths that are told apart; deeper ones are taken together."""

_WINDOW = 48
"""Steps with observations that a class remembers."""

_PRIOR = 2.0
"""Observations that a class's probability counts for before there are any."""

_DEPTH_PRIOR = 6.0
"""Observations that a class over all depths counts for at one depth."""

_NEWEST_WINDOW = 5
"""Steps with observations that are compared with those before."""

_SURPRISE = 3.0
"""Deviations that are no chance, in standard deviations."""

_SHARPEN = 0.5
"""Change of the power with an outcome, as a part of what the power is off."""

_MOST_POWER = 4.0
"""Probabilities are taken to this power at most, or to its inverse."""

_ROW_WINDOW = 10
"""Tries that a row remembers."""

_ROW_STEPS = 300
"""Steps that a row remembers."""

_ROW_PRIOR = 1.0
"""Acceptances, and as many misses, that a row is given beside its own."""


def classes_of(probabilities: Floats) -> Ints:
    """The class of each probability."""
    return _EDGES.searchsorted(probabilities, side="right")


def adjusted(chances: Floats, odds: Floats) -> Floats:
    """The chances where the odds are so many times as good."""
    better = odds * chances
    return better / (1 - chances + better)


class Calibration:
    """The chance that a node is accepted once its parent is, by class of its probability and by depth."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: depths.
        """
        self._shape = _NUM_DEPTHS, len(_CENTRES)
        self._tried, self._accepted = np.zeros((2, *self._shape))
        # Tries, acceptances, their mean and their variance by the chances before them.
        self._newest = np.zeros((4, len(_CENTRES)))
        self._depths = np.minimum(np.arange(most), _NUM_DEPTHS - 1) * len(_CENTRES)
        self._chances = self._now()

    def of(self, classes: Ints) -> Floats:
        """Chances of the nodes of each depth: classes [..., depths] -> [..., depths]."""
        chances: Floats = self._chances.take(classes + self._depths)
        return chances

    def least(self, chance: float, odds: float) -> float:
        """Below which probability a first node of no row is accepted with that chance, if no row's odds are
        better than these."""
        (good,) = (adjusted(self._chances[0], np.array(odds)) >= chance).nonzero()
        if not len(good):
            return 1.1
        return float(_EDGES[good[0] - 1]) if good[0] else 0.0

    def note(self, depths: Ints, classes: Ints, accepted: NDArray[np.bool_]) -> None:
        """Notes the outcome of comparisons, at depths from 0 on."""
        at = self._depths[depths] + classes
        tried = np.bincount(at, minlength=self._tried.size).reshape(self._shape)
        right = np.bincount(at[accepted], minlength=self._tried.size).reshape(self._shape)
        self._watch(tried, right)
        kept = np.where(tried > 0, 1 - 1 / _WINDOW, 1.0)
        self._tried = self._tried * kept + tried
        self._accepted = self._accepted * kept + right
        self._chances = self._now()

    def _watch(self, tried: Ints, right: Ints) -> None:
        """Forgets what was before, in classes whose newest outcomes are too far off it for chance."""
        expected = tried * self._chances
        scatter = expected * (1 - self._chances)
        seen = np.array([each.sum(axis=0) for each in (tried, right, expected, scatter)])
        kept = np.where(seen[0] > 0, 1 - 1 / _NEWEST_WINDOW, 1.0)
        self._newest = self._newest * kept + seen
        num, accepted, mean, variance = self._newest
        off = np.abs(accepted - mean) > _SURPRISE * np.sqrt(variance + 0.1)
        if off.any():
            # Left are as many outcomes as the newest ones, and like them.
            left = np.minimum(1.0, num / np.maximum(self._tried.sum(axis=0), 1.0))
            self._tried = np.where(off, self._tried * left, self._tried)
            like_them = self._tried * (accepted / np.maximum(num, 1.0))
            self._accepted = np.where(off, like_them, self._accepted)
            self._newest[:, off] = 0.0

    def _now(self) -> Floats:
        """[depth classes, probability classes]"""
        tried, accepted = self._tried.sum(axis=0), self._accepted.sum(axis=0)
        of_class = (accepted + _PRIOR * _CENTRES) / (tried + _PRIOR)
        chances = (self._accepted + _DEPTH_PRIOR * of_class) / (self._tried + _DEPTH_PRIOR)
        clipped: Floats = np.clip(chances, LEAST, 1 - LEAST)
        return clipped


class Sharpness:
    """The power of a drafter's probabilities that makes them those of acceptance, where siblings are to be
    told apart: of these only their depth's outcome is known.

    Attributes:
        power: 1: they are as good as they are.
    """

    def __init__(self) -> None:
        self.power = 1.0

    def note(self, classes: Ints, accepted: NDArray[np.bool_]) -> None:
        """Notes the outcome of depths of trees, of these classes."""
        if len(classes):
            too_sure = float(_CENTRES[classes].mean() - accepted.mean())
            power = self.power * math.exp(_SHARPEN * min(1.0, len(classes) / 16) * too_sure)
            self.power = min(max(power, 1 / _MOST_POWER), _MOST_POWER)


class RowOdds:
    """How much better or worse each row's odds are than those of all, by its last tries.

    Attributes:
        values: [slots]; 1: as those of all.
    """

    def __init__(self, num_slots: int) -> None:
        self.values: Floats = np.ones(num_slots)
        # By slot and with decay: tries, acceptances, and what all rows' chances promised of them.
        self._counts = np.zeros((3, num_slots))

    def widen(self, num_slots: int) -> None:
        """Room for so many more slots."""
        self.values = np.concatenate([self.values, np.ones(num_slots)])
        self._counts = np.concatenate([self._counts, np.zeros((3, num_slots))], axis=1)

    def clear(self, slot: int) -> None:
        """The slot is another row's."""
        self._counts[:, slot] = 0.0
        self.values[slot] = 1.0

    def note(self, slots: Ints, tried: Ints, accepted: Ints, expected: Floats) -> None:
        """Notes tries of some rows, and how many acceptances all rows' chances promised."""
        kept = (1 - 1 / _ROW_WINDOW) ** tried
        counts = self._counts[:, slots] * kept + np.array([tried, accepted, expected])
        self._counts[:, slots] = counts
        self.values[slots] = _odds(*counts)

    def fade(self, num_steps: int) -> None:
        """So many steps have passed: what a row did long ago says less of it."""
        self._counts *= (1 - 1 / _ROW_STEPS) ** num_steps
        self.values = _odds(*self._counts)


def _odds(tried: Floats, accepted: Floats, expected: Floats) -> Floats:
    off = accepted - expected
    # What chance alone brings about says nothing.
    chance = np.sqrt(np.maximum(expected * (1 - expected / np.maximum(tried, 1.0)), 0.0))
    right = expected + np.sign(off) * np.maximum(np.abs(off) - chance, 0.0)
    own = (right + _ROW_PRIOR) / (np.maximum(tried - right, 0.0) + _ROW_PRIOR)
    odds: Floats = own * (np.maximum(tried - expected, 0.0) + _ROW_PRIOR) / (expected + _ROW_PRIOR)
    return odds
