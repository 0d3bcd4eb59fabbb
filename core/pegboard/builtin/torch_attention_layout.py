"""What a block of the torch attention backend holds. Does not import torch: the planner calls it."""

from __future__ import annotations

from pegboard.errors import ConfigError
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.workload import Workload

SPAN = 128
"""Most queries of a tile's span."""

TILE_ELEMENTS = 2**20
"""Most scores, keys or values in a tile of several rows: bounds memory and stays near the cache."""


def layout(group: KVGroup) -> tuple[TensorSpec, ...]:
    """Keys and values of one layer's block, [block_size, num_kv_heads, head_dim] each.

    Raises:
        ConfigError: the group's encoding is not `none`.
    """
    if group.encoding != "none":
        raise ConfigError(
            "kv_cache.encoding",
            f"{group.encoding!r} with the torch attention backend",
            allowed="none",
            fix="set kv_cache.encoding to none, or choose another attention backend",
        )
    shape = (group.block_size, group.num_kv_heads, group.head_dim)
    return (TensorSpec("k", shape, group.dtype), TensorSpec("v", shape, group.dtype))


def estimate(workload: Workload) -> int:
    """Bytes of the largest tile: keys and values of a longest row, scores and mask of a span."""
    item = 8 if workload.dtype == "float64" else 4
    largest = max(
        workload.max_model_len
        * (2 * item * layer.num_kv_heads * layer.head_dim + SPAN * (item * layer.num_heads + 1))
        for layer in workload.shape.attention
    )
    return max(largest, 4 * item * TILE_ELEMENTS)
