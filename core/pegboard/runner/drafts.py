"""The draft nodes that rows hold between steps."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pegboard.errors import EngineError
from pegboard.step import Bool, Drafts, Float32, Int32, Numbers

ROOT = -1
"""Parent of a node that follows the last known token."""


class DraftTable:
    """Draft nodes by row, padded to the most that any row held.

    Attributes:
        token_ids: int32 [max_num_seqs, width].
        parents: int32 [max_num_seqs, width], a node's parent among the row's nodes; ROOT: none.
        confidences: float32 [max_num_seqs, width].
        counts: int32 [max_num_seqs]; entries past a row's count are void.
        has_trees: whether a row ever held anything but a chain.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, *, keeps_trees: bool) -> None:
        """
        Args:
            keeps_trees: whether trees can be verified; if not, of each the path of first children is
                kept.
        """
        self._vocab_size = vocab_size
        self._keeps_trees = keeps_trees
        self.token_ids: Int32 = np.zeros((max_num_seqs, 1), dtype=np.int32)
        self.parents: Int32 = np.full((max_num_seqs, 1), ROOT, dtype=np.int32)
        self.confidences: Float32 = np.zeros((max_num_seqs, 1), dtype=np.float32)
        self.counts: Int32 = np.zeros(max_num_seqs, dtype=np.int32)
        self.has_trees = False

    def drop(self, rows: Int32) -> None:
        """Forgets the nodes of rows."""
        self.counts[rows] = 0

    def put(self, drafts: Drafts, confidences: Float32) -> None:
        """Replaces the nodes of the rows that the drafts name.

        Raises:
            EngineError: nodes that no verification could use, naming the row.
        """
        self.check(drafts, confidences)
        if not self._keeps_trees:
            drafts, confidences = first_paths(drafts, confidences)
        counts = np.diff(drafts.offsets)
        if not len(drafts.token_ids):
            self.counts[drafts.rows] = 0
            return
        width = int(counts.max())
        self.token_ids = widen(self.token_ids, width)
        self.parents = widen(self.parents, width)
        self.confidences = widen(self.confidences, width)
        rows, node = self.places(drafts, counts)
        self.token_ids[rows, node] = drafts.token_ids
        self.parents[rows, node] = drafts.parents
        self.confidences[rows, node] = confidences
        self.counts[drafts.rows] = counts
        self.has_trees |= bool((drafts.parents != node - 1).any())

    def confidences_of(self, rows: Int32) -> Float32:
        """The probabilities of all nodes of the rows, one row after the other."""
        return self.confidences[rows][self._held(rows)]

    def parents_of(self, rows: Int32) -> Int32 | None:
        """The parents of all nodes of the rows; None when all rows hold chains."""
        if not self.has_trees or not self.counts[rows].any():
            return None
        held = self._held(rows)
        parents = self.parents[rows]
        if np.array_equal(parents[held], chain_parents(parents)[held]):
            return None
        return parents[held]

    def check(self, drafts: Drafts, confidences: Float32) -> None:
        """Raises EngineError for nodes that no verification could use, naming the row."""
        counts = np.diff(drafts.offsets)
        lengths = {len(drafts.token_ids), len(drafts.parents), len(confidences)}
        ends = {int(at) for at in drafts.offsets[[0, -1]]} if len(drafts.offsets) else set()
        if len(counts) != len(drafts.rows) or ends != {0, *lengths} or (counts < 0).any():
            raise EngineError("drafts: rows, offsets, token ids, parents and confidences disagree")
        listed = sorted(drafts.rows.tolist())
        if len(set(listed)) < len(listed) or (
            listed and not 0 <= listed[0] <= listed[-1] < len(self.counts)
        ):
            raise EngineError(
                f"drafts: rows {listed}; allowed: 0 to {len(self.counts) - 1}, each once"
            )
        rows, node = self.places(drafts, counts)
        wrong = (drafts.token_ids < 0) | (drafts.token_ids >= self._vocab_size)
        wrong |= (drafts.parents < ROOT) | (drafts.parents >= node)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise EngineError(
                f"drafts of row {rows[at]}: node {node[at]} has token {drafts.token_ids[at]} and "
                f"parent {drafts.parents[at]}; allowed: tokens below {self._vocab_size}, parents "
                "that precede the node"
            )

    @staticmethod
    def places(drafts: Drafts, counts: Int32) -> tuple[Int32, Int32]:
        """Row and number within the row of each node."""
        rows = np.repeat(drafts.rows, counts)
        node = np.arange(len(rows)) - np.repeat(drafts.offsets[:-1], counts)
        return rows, node.astype(np.int32)

    def _held(self, rows: Int32) -> Bool:
        return np.arange(self.token_ids.shape[1]) < self.counts[rows][:, None]


def first_paths(drafts: Drafts, confidences: Float32) -> tuple[Drafts, Float32]:
    """Cuts each tree to its path of first children: the first node, its first child, and so on. A chain
    stays whole."""
    kept = np.zeros(len(drafts.parents), np.bool_)
    for start, stop in pairwise(drafts.offsets.tolist()):
        last = ROOT
        for node, parent in enumerate(drafts.parents[start:stop].tolist()):
            if parent == last:
                kept[start + node] = True
                last = node
    if kept.all():
        return drafts, confidences
    offsets = np.concatenate(([0], np.cumsum(kept)))[drafts.offsets].astype(np.int32)
    counts = np.diff(offsets)
    parents = np.arange(len(drafts.parents[kept])) - np.repeat(offsets[:-1], counts) - 1
    chains = Drafts(
        rows=drafts.rows,
        offsets=offsets,
        token_ids=drafts.token_ids[kept],
        parents=parents.astype(np.int32),
    )
    return chains, confidences[kept]


def chain_parents(parents: Int32) -> Int32:
    """The `parents`, [num_rows, width], of chains."""
    return np.broadcast_to(np.arange(ROOT, parents.shape[1] - 1, dtype=np.int32), parents.shape)


def widen(table: NDArray[Numbers], width: int) -> NDArray[Numbers]:
    """The table, or a copy of it with at least `width` zeroed columns.

    Growing at least doubles, so that it is rare.
    """
    rows, columns = table.shape
    if width <= columns:
        return table
    wider = np.zeros((rows, max(width, 2 * columns)), dtype=table.dtype)
    wider[:, :columns] = table
    return wider
