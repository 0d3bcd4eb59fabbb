"""Drafts as arrays, and what they are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pegboard.builtin.adaptive.acceptance import (
    Calibration,
    Floats,
    Ints,
    adjusted,
    classes_of,
    tree_chances,
)
from pegboard.interfaces.speculation_policy import DraftView


@dataclass(slots=True)
class Drafted:
    """The nodes of R rows, at most K each.

    Attributes:
        counts: int64 [R].
        classes: int64 [R, K], of the chance at each depth: see `classes_of`; void past the last.
        num_depths: int64 [R].
        depths: int64 [R, K], of each node, from 0 on.
        shares: float64 [R, K], each node's part of its depth's chance; 0 past the last node.
    """

    counts: Ints
    classes: Ints
    num_depths: Ints
    depths: Ints
    shares: Floats

    def worth(self, calibration: Calibration, odds: Floats) -> Floats:
        """The chance that each node is accepted: [..., R, K] for odds [..., R]. Of a later node not more
        than of an earlier one, so that the best of all rows' are first ones of each."""
        reached = np.cumprod(adjusted(calibration.of(self.classes), odds[..., None]), axis=-1)
        depths = np.broadcast_to(self.depths, reached.shape)
        worth = np.take_along_axis(reached, depths, axis=-1) * self.shares
        return np.minimum.accumulate(worth, axis=-1)


def drafted(rows: Sequence[DraftView], most: int) -> Drafted:
    """The nodes that rows hold, of each the first `most`."""
    num_rows = len(rows)
    counts = np.array([min(row.num_drafts, most) for row in rows], np.int64)
    place = np.arange(most)
    held = place < counts[:, None]
    classes = np.zeros((num_rows, most), np.int64)
    flat = np.array(list(chain.from_iterable(row.confidences[:most] for row in rows)), np.float64)
    classes[held] = classes_of(flat)
    depths = np.where(held, place, 0)
    found = Drafted(counts, classes, counts.copy(), depths, held.astype(np.float64))
    for index, row in enumerate(rows):
        if not is_chain(row.parents):
            _put_tree(found, index, row.parents[:most], row.confidences[:most])
    return found


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each node is the only child of the one before."""
    return isinstance(parents, range) or all(
        parent == node - 1 for node, parent in enumerate(parents)
    )


def _put_tree(
    found: Drafted, index: int, parents: Sequence[int], probabilities: Sequence[float]
) -> None:
    chances, depths, shares = tree_chances(parents, probabilities)
    found.num_depths[index] = len(chances)
    found.classes[index, : len(chances)] = classes_of(np.array(chances))
    found.depths[index, : len(depths)] = depths
    found.shares[index, : len(shares)] = shares
