"""What a block of the torch attention backend holds. Does not import torch: the planner calls it."""

from __future__ import annotations

from pegboard.errors import ConfigError
from pegboard.interfaces.kv import KVGroup, TensorSpec


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
