"""Nodes of rows as the core takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pegboard.step import Drafts, Float32, Int32

Nodes = tuple[Int32, Int32, Float32]
"""Tokens, parents and probabilities of a row's nodes."""


def drafts_of(rows: Int32, nodes: Sequence[Nodes]) -> tuple[Drafts, Float32]:
    """The nodes of rows, one row after the other."""
    token_ids, parents, probabilities = zip(*nodes, strict=True) if nodes else ((), (), ())
    drafts = Drafts(
        rows=rows.astype(np.int32),
        offsets=offsets_of(np.array([len(one) for one in token_ids], np.int64)),
        token_ids=np.concatenate((np.empty(0, np.int32), *token_ids)),
        parents=np.concatenate((np.empty(0, np.int32), *parents)),
    )
    return drafts, np.concatenate((np.empty(0, np.float32), *probabilities))


def chains_of(
    rows: Int32,
    owners: Sequence[np.ndarray],
    token_ids: Sequence[np.ndarray],
    probabilities: Sequence[Float32],
) -> tuple[Drafts, Float32]:
    """The chains of rows, of what each depth brought.

    Args:
        owners: of each depth, whose tokens they are, in `rows`.
        token_ids, probabilities: of each depth.
    """
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")  # a row's tokens stay in the order of their depths
    counts = np.bincount(owner, minlength=len(rows))
    offsets = offsets_of(counts)
    drafts = Drafts(
        rows=rows.astype(np.int32),
        offsets=offsets,
        token_ids=np.concatenate(token_ids)[order].astype(np.int32),
        parents=(np.arange(len(order)) - np.repeat(offsets[:-1], counts) - 1).astype(np.int32),
    )
    return drafts, np.concatenate(probabilities)[order].astype(np.float32)


def offsets_of(counts: np.ndarray) -> Int32:
    """Offsets of ragged rows: int32 [rows + 1]."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
