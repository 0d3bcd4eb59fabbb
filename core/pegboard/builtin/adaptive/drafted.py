"""Drafts as arrays, and what they are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pegboard.builtin.adaptive.acceptance import (
    LEAST,
    Calibration,
    Floats,
    Ints,
    adjusted,
    classes_of,
)
from pegboard.interfaces.speculation_policy import DraftView

LEAST_CHANCE = 1e-100
"""Products of many small probabilities stay above it, so that one can be divided by another."""


@dataclass(slots=True)
class Drafted:
    """The nodes of R rows, at most K each.

    Attributes:
        counts: int64 [R].
        classes: int64 [R, K], of the chance at each depth: see `classes_of`; void past the last.
        num_depths: int64 [R].
        depths: int64 [R, K], of each node, from 0 on; None: all rows hold chains.
        shares: float64 [R, K], each node's part of its depth's chance; 0 past the last node.
    """

    counts: Ints
    classes: Ints
    num_depths: Ints
    depths: Ints | None
    shares: Floats

    def worth(self, calibration: Calibration, odds: Floats) -> Floats:
        """The chance that each node is accepted: [..., R, K] for odds [..., R]. Of a later node not more
        than of an earlier one, so that the best of all rows' are first ones of each."""
        chances = calibration.of(self.classes)
        if not (odds == 1).all():
            chances = adjusted(chances, odds[..., None])
        worth = chances.cumprod(axis=-1)
        if self.depths is not None:
            depths = np.broadcast_to(self.depths, worth.shape)
            worth = np.take_along_axis(worth, depths, axis=-1)
        return np.minimum.accumulate(worth * self.shares, axis=-1)


def drafted(rows: Sequence[DraftView], counts: Ints, most: int, power: float) -> Drafted:
    """The first so many nodes of each row, at most `most`; for `power` see `tree_chances`."""
    held = np.arange(most) < counts[:, None]
    classes = np.zeros(held.shape, np.int64)
    parts = [
        row.confidences if row.num_drafts == count else row.confidences[:count]
        for row, count in zip(rows, counts.tolist(), strict=True)
    ]
    classes[held] = classes_of(np.array(list(chain.from_iterable(parts)), np.float64))
    shares = held.astype(np.float64)
    trees = [
        index
        for index, row in enumerate(rows)
        if type(row.parents) is not range and not is_chain(row.parents)
    ]
    if not trees:
        return Drafted(counts, classes, counts, None, shares)
    num_depths, depths = counts.copy(), np.where(held, np.arange(most), 0)
    for index in trees:
        count = int(counts[index])
        chances, own_depths, own_shares = tree_chances(rows[index], count, power)
        num_depths[index] = len(chances)
        classes[index, : len(chances)] = classes_of(chances)
        depths[index, :count] = own_depths
        shares[index, :count] = own_shares
    return Drafted(counts, classes, num_depths, depths, shares)


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each node is the only child of the one before."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def tree_chances(row: DraftView, count: int, power: float) -> tuple[Floats, list[int], list[float]]:
    """What the first nodes of a tree say of it, their probabilities taken to a power.

    Returns:
        Of each depth the chance that one of its nodes is accepted, given that one above it was; of each
        node its depth, and its part of its depth's chance.
    """
    depths: list[int] = []
    reached: list[float] = []
    by_depth: list[float] = []
    nodes = zip(row.parents[:count], row.confidences[:count], strict=True)
    for parent, probability in nodes:
        depth, above = (0, 1.0) if parent < 0 else (depths[parent] + 1, reached[parent])
        chance = max(above * max(probability, LEAST) ** power, LEAST_CHANCE)
        depths.append(depth)
        reached.append(chance)
        if depth == len(by_depth):
            by_depth.append(0.0)
        by_depth[depth] += chance
    chances = np.minimum(np.array(by_depth) / np.array([1.0, *by_depth[:-1]]), 1.0)
    shares = [chance / by_depth[depth] for chance, depth in zip(reached, depths, strict=True)]
    return chances, depths, shares
