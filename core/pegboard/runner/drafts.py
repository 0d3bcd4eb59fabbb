"""The draft nodes that rows hold between steps."""

from __future__ import annotations

import numpy as np

from pegboard.errors import EngineError
from pegboard.runner.widen import widen
from pegboard.step import Drafts, Float32, Int32

ROOT = -1
"""Parent of a node that follows the last known token."""


class DraftTable:
    """Draft nodes by row, padded to the most that any row held.

    Attributes:
        token_ids: int32 [max_num_seqs, width].
        parents: int32 [max_num_seqs, width], a node's parent among the row's nodes; ROOT: none.
        confidences: float32 [max_num_seqs, width].
        counts: int32 [max_num_seqs]; entries past a row's count are void.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.token_ids: Int32 = np.zeros((max_num_seqs, 1), dtype=np.int32)
        self.parents: Int32 = np.full((max_num_seqs, 1), ROOT, dtype=np.int32)
        self.confidences: Float32 = np.zeros((max_num_seqs, 1), dtype=np.float32)
        self.counts: Int32 = np.zeros(max_num_seqs, dtype=np.int32)

    def drop(self, rows: Int32) -> None:
        """Forgets the nodes of rows."""
        self.counts[rows] = 0

    def put(self, drafts: Drafts, confidences: Float32 | None = None) -> None:
        """Replaces the nodes of the rows that the drafts name.

        Raises:
            EngineError: nodes that no verification could use, naming the row.
        """
        counts = np.diff(drafts.offsets)
        self._check(drafts, counts, confidences)
        if not len(drafts.token_ids):
            self.counts[drafts.rows] = 0
            return
        width = int(counts.max())
        self.token_ids = widen(self.token_ids, width)
        self.parents = widen(self.parents, width)
        self.confidences = widen(self.confidences, width)
        rows, node = self._places(drafts, counts)
        self.token_ids[rows, node] = drafts.token_ids
        self.parents[rows, node] = drafts.parents
        self.confidences[rows, node] = 1.0 if confidences is None else confidences
        self.counts[drafts.rows] = counts

    def confidences_of(self, rows: Int32) -> Float32:
        """The probabilities of all nodes of the rows, one row after the other."""
        return self.confidences[rows][self._held(rows)]

    def parents_of(self, rows: Int32) -> Int32 | None:
        """The parents of all nodes of the rows; None when all rows hold chains."""
        if not self.counts[rows].any():
            return None
        held = self._held(rows)
        parents = self.parents[rows]
        if np.array_equal(parents[held], chain_parents(parents)[held]):
            return None
        return parents[held]

    def _held(self, rows: Int32) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        return np.arange(self.token_ids.shape[1]) < self.counts[rows][:, None]

    def _check(self, drafts: Drafts, counts: Int32, confidences: Float32 | None) -> None:
        total = int(drafts.offsets[-1])
        lengths = {len(drafts.token_ids), len(drafts.parents)}
        if confidences is not None:
            lengths.add(len(confidences))
        if len(counts) != len(drafts.rows) or lengths != {total} or (counts < 0).any():
            raise EngineError("drafts: rows, offsets, token ids, parents and confidences disagree")
        rows, node = self._places(drafts, counts)
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
    def _places(drafts: Drafts, counts: Int32) -> tuple[Int32, Int32]:
        """Row and number within the row of each node."""
        rows = np.repeat(drafts.rows, counts)
        node = np.arange(len(rows)) - np.repeat(drafts.offsets[:-1], counts)
        return rows, node.astype(np.int32)


def chain_parents(parents: Int32) -> Int32:
    """What `parents`, [num_rows, width], would be if every row held a chain."""
    return np.broadcast_to(np.arange(ROOT, parents.shape[1] - 1, dtype=np.int32), parents.shape)
