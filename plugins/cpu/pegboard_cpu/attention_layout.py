"""What a block of the native attention backend holds. Does not import torch: the planner calls it."""

from __future__ import annotations

import os

from pegboard.errors import ConfigError
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.workload import Workload

VECTOR = 16
"""Elements of the widest vector: values are padded to whole ones."""

BLOCK_QUERIES = 64
"""Queries that share a loaded tile of keys and values, unless one token has more."""

TILE = 64
"""Slots of a tile."""


def padded(head_dim: int) -> int:
    """Elements that a head's values take in a page."""
    return -(-head_dim // VECTOR) * VECTOR


def layout(group: KVGroup) -> tuple[TensorSpec, ...]:
    """One layer's block: keys [num_kv_heads, head_dim, block_size], so that a vector holds one element
    of consecutive slots; values [num_kv_heads, block_size, padded head_dim].

    Raises:
        ConfigError: the group's encoding is not `none`.
    """
    if group.encoding != "none":
        raise ConfigError(
            "kv_cache.encoding",
            f"{group.encoding!r} with the cpu attention backend",
            allowed="none",
            fix="set kv_cache.encoding to none, or choose another attention backend",
        )
    heads, size = group.num_kv_heads, group.block_size
    return (
        TensorSpec("k", (heads, group.head_dim, size), group.dtype),
        TensorSpec("v", (heads, size, padded(group.head_dim)), group.dtype),
    )


def estimate(workload: Workload) -> int:
    """Bytes that the threads work in: a block's queries and sums, a tile's keys and scores. As many
    threads are counted as there are processors."""
    largest = 0
    for layer in workload.shape.attention:
        queries = max(BLOCK_QUERIES, layer.num_heads // layer.num_kv_heads)
        of_a_query = layer.head_dim + padded(layer.head_dim) + VECTOR + 1
        largest = max(largest, queries * of_a_query + TILE * (layer.head_dim + 6))
    return 4 * largest * (os.cpu_count() or 1)
