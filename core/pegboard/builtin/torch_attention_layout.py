"""The tensors of a block of the torch attention backend. Torch-free: the planner calls it."""

from __future__ import annotations

from pegboard.errors import ConfigError
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.workload import Workload

SPAN = 128
"""Most queries of a tile's span."""

TILE_ELEMENTS = 2**20
"""Most scores, keys or values in a tile of several rows: bounds memory and stays near the cache."""

STORED = {"fp8_e4m3": "uint8", "int8": "int8"}
"""The dtype in which blocks hold the codes of each encoding."""


def layout(group: KVGroup) -> tuple[TensorSpec, ...]:
    """Keys and values of one layer's block, [block_size, num_kv_heads, head_dim] each; of an encoding,
    their scales [block_size, num_kv_heads] too.

    Raises:
        ConfigError: the backend does not have the group's encoding.
    """
    shape = (group.block_size, group.num_kv_heads, group.head_dim)
    if group.encoding == "none":
        return (TensorSpec("k", shape, group.dtype), TensorSpec("v", shape, group.dtype))
    if group.encoding not in STORED:
        raise ConfigError(
            "kv_cache.encoding",
            f"{group.encoding!r} with the torch attention backend",
            allowed=", ".join(("none", *STORED)),
            fix="choose one of these, or another attention backend",
        )
    stored = STORED[group.encoding]
    return (
        TensorSpec("k", shape, stored),
        TensorSpec("v", shape, stored),
        TensorSpec("k_scale", shape[:2], "float32"),
        TensorSpec("v_scale", shape[:2], "float32"),
    )


def estimate(workload: Workload) -> int:
    """Bytes of the largest tile: keys and values of a longest row, as they are kept and as they count;
    scores and mask of a span."""
    item = 8 if workload.dtype == "float64" else 4
    largest = max(
        workload.max_model_len
        * (4 * item * layer.num_kv_heads * layer.head_dim + SPAN * (item * layer.num_heads + 1))
        for layer in workload.shape.attention
    )
    return max(largest, 4 * item * TILE_ELEMENTS)
