"""The tensors of a block of the native attention backend. Torch-free: the planner calls it."""

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


STORED = {"fp8_e4m3": "uint8", "int8": "int8"}
"""The dtype in which blocks hold the codes of each encoding."""


def padded(head_dim: int) -> int:
    """Elements that a head's values take in a block."""
    return -(-head_dim // VECTOR) * VECTOR


def layout(group: KVGroup) -> tuple[TensorSpec, ...]:
    """One layer's block: keys [num_kv_heads, head_dim, block_size], so that a vector holds one element
    of consecutive slots; values [num_kv_heads, block_size, padded head_dim]; of an encoding, their
    scales [num_kv_heads, block_size] too.

    Raises:
        ConfigError: the backend does not have the group's encoding.
    """
    heads, size = group.num_kv_heads, group.block_size
    keys, values = (heads, group.head_dim, size), (heads, size, padded(group.head_dim))
    if group.encoding == "none":
        return (TensorSpec("k", keys, group.dtype), TensorSpec("v", values, group.dtype))
    if group.encoding not in STORED:
        raise ConfigError(
            "kv_cache.encoding",
            f"{group.encoding!r} with the cpu attention backend",
            allowed=", ".join(("none", *STORED)),
            fix="choose one of these, or another attention backend",
        )
    stored = STORED[group.encoding]
    return (
        TensorSpec("k", keys, stored),
        TensorSpec("v", values, stored),
        TensorSpec("k_scale", (heads, size), "float32"),
        TensorSpec("v_scale", (heads, size), "float32"),
    )


def estimate(workload: Workload) -> int:
    """Bytes that the threads work in: a block's queries and sums, a tile's keys, values and scores. As
    many threads are counted as there are processors."""
    largest = 0
    for layer in workload.shape.attention:
        queries = max(BLOCK_QUERIES, layer.num_heads // layer.num_kv_heads)
        of_a_query = layer.head_dim + padded(layer.head_dim) + VECTOR + 1
        of_a_slot = layer.head_dim + padded(layer.head_dim) + 6
        largest = max(largest, queries * of_a_query + TILE * of_a_slot)
    return 4 * largest * (os.cpu_count() or 1)
