"""How likely drafts are accepted, by what was accepted so far.

A drafter's probabilities may be far off. What counts is how often drafts of such a probability, at such a
depth, were accepted lately: in all rows (`Calibration`), and in the row itself as against all (`RowOdds`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

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

_NEWEST_KEPT = 0.8
"""Part of the newest outcomes that stays so with each further step."""

_SURPRISE = 3.0
"""Deviations that are no chance, in standard deviations."""

_ROW_WINDOW = 10
"""Tries that a row remembers."""

_ROW_STEPS = 300
"""Steps that a row remembers."""

_ROW_PRIOR = 1.0
"""Acceptances, and as many misses, that a row is given beside its own."""

LEAST = 1e-3
"""Neither acceptance nor its contrary is taken to be less likely than that."""


class Calibration:
    """The chance that a node is accepted once its parent is, by class of its probability and depth."""

    def __init__(self) -> None:
        shape = (_NUM_DEPTHS, len(_CENTRES))
        self._tried = np.zeros(shape)
        self._accepted = np.zeros(shape)
        self._newest = np.zeros((4, len(_CENTRES)))
        self._chances: Floats | None = None

    @property
    def chances(self) -> Floats:
        """[depth classes, probability classes]"""
        if self._chances is None:
            tried, accepted = self._tried.sum(0), self._accepted.sum(0)
            of_class = (accepted + _PRIOR * _CENTRES) / (tried + _PRIOR)
            chances = (self._accepted + _DEPTH_PRIOR * of_class) / (self._tried + _DEPTH_PRIOR)
            self._chances = np.clip(chances, LEAST, 1 - LEAST)
        return self._chances

    def note(self, depths: Ints, classes: Ints, accepted: NDArray[np.bool_]) -> None:
        """Notes the outcome of comparisons of one step: at depths from 0 on."""
        num_classes = len(_CENTRES)
        at = np.minimum(depths, _NUM_DEPTHS - 1) * num_classes + classes
        tried = np.bincount(at, minlength=self._tried.size)
        right = np.bincount(at[accepted], minlength=self._tried.size)
        tried, right = tried.reshape(self._tried.shape), right.reshape(self._tried.shape)
        self._watch(tried, right)
        kept = np.where(tried > 0, 1 - 1 / _WINDOW, 1.0)
        self._tried = self._tried * kept + tried
        self._accepted = self._accepted * kept + right
        self._chances = None

    def _watch(self, tried: Ints, right: Ints) -> None:
        """Forgets what was before, in classes whose newest outcomes are too far off it for chance."""
        chances = self.chances
        expected = tried * chances
        seen = np.stack(
            [each.sum(axis=0) for each in (tried, right, expected, expected * (1 - chances))]
        )
        self._newest = np.where(seen[0] > 0, self._newest * _NEWEST_KEPT, self._newest) + seen
        num, accepted, mean, variance = self._newest
        off = np.abs(accepted - mean) > _SURPRISE * np.sqrt(variance + 0.1)
        if off.any():
            kept = np.where(
                off, np.minimum(1.0, num / np.maximum(self._tried.sum(axis=0), 1.0)), 1.0
            )
            self._tried *= kept
            # What is left of it are as many outcomes as the newest ones, and like them.
            self._accepted = np.where(
                off, self._tried * (accepted / np.maximum(num, 1.0)), self._accepted
            )
            self._newest[:, off] = 0.0

    def of(self, classes: Ints) -> Floats:
        """Chances of nodes by depth: classes [..., depths] -> [..., depths]."""
        depths = np.minimum(np.arange(classes.shape[-1]), _NUM_DEPTHS - 1)
        return self.chances[depths, classes]


def classes_of(probabilities: Floats) -> Ints:
    """The class of each probability."""
    return np.searchsorted(_EDGES, probabilities, side="right").astype(np.int64)


def adjusted(chances: Floats, odds: Floats) -> Floats:
    """The chances where the odds are so many times as good."""
    better = odds * chances
    return better / (1 - chances + better)


class RowOdds:
    """How much better or worse each row's odds are than those of all, by its last tries.

    Attributes:
        tried, accepted: by slot, counted with decay.
        expected: what would have been accepted by the chances of all.
    """

    def __init__(self, num_slots: int) -> None:
        self.tried, self.accepted, self.expected = np.zeros((3, num_slots))

    def widen(self, num_slots: int) -> None:
        """Room for so many slots."""
        for name in ("tried", "accepted", "expected"):
            old = getattr(self, name)
            new = np.zeros(num_slots)
            new[: len(old)] = old
            setattr(self, name, new)

    def clear(self, slot: int) -> None:
        """The slot is another row's."""
        self.tried[slot] = self.accepted[slot] = self.expected[slot] = 0.0

    def fade(self, steps: int) -> None:
        """So many steps have passed: what a row did long ago says less of it."""
        kept = (1 - 1 / _ROW_STEPS) ** steps
        self.tried *= kept
        self.accepted *= kept
        self.expected *= kept

    def note(self, slots: Ints, tried: Ints, accepted: Ints, expected: Floats) -> None:
        """Notes tries of some rows, and how many acceptances all rows' chances promised."""
        kept = (1 - 1 / _ROW_WINDOW) ** tried
        self.tried[slots] = self.tried[slots] * kept + tried
        self.accepted[slots] = self.accepted[slots] * kept + accepted
        self.expected[slots] = self.expected[slots] * kept + expected

    def of(self, slots: Ints) -> Floats:
        """[slots], odds as against those of all rows."""
        tried, expected = self.tried[slots], self.expected[slots]
        off = self.accepted[slots] - expected
        # What chance alone brings about says nothing.
        chance = np.sqrt(expected * (1 - expected / np.maximum(tried, 1.0)))
        right = expected + np.sign(off) * np.maximum(np.abs(off) - chance, 0.0)
        own = (right + _ROW_PRIOR) / (tried - right + _ROW_PRIOR)
        odds: Floats = own * (tried - expected + _ROW_PRIOR) / (expected + _ROW_PRIOR)
        return odds


def tree_chances(
    parents: Sequence[int], probabilities: Sequence[float]
) -> tuple[list[float], list[int], list[float]]:
    """What a tree says of itself.

    Returns:
        Of each depth the chance that one of its nodes is accepted, given that one above it was; of each
        node its depth, and its part of its depth's chance.
    """
    depths: list[int] = []
    reached: list[float] = []
    by_depth: list[float] = []
    for parent, probability in zip(parents, probabilities, strict=True):
        depth = 0 if parent < 0 else depths[parent] + 1
        chance = max(probability, LEAST) * (1.0 if parent < 0 else reached[parent])
        depths.append(depth)
        reached.append(chance)
        if depth == len(by_depth):
            by_depth.append(0.0)
        by_depth[depth] += chance
    shares = [chance / by_depth[depth] for chance, depth in zip(reached, depths, strict=True)]
    above = [1.0, *by_depth[:-1]]
    chances = [min(1.0, here / over) for here, over in zip(by_depth, above, strict=True)]
    return chances, depths, shares
