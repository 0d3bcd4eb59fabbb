"""Descriptions of KV memory that host, worker and planner share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Decoder layers whose KV shares layout, window and encoding, and so one block table.

    Attributes:
        layers: indices of the model's decoder layers.
        num_kv_heads: KV heads a layer.
        head_dim: elements a head.
        block_size: tokens a block.
        window: a token attends to the last `window` tokens, itself included; None: to all.
        encoding: name of the KV encoding; `none` stores `dtype` as it is.
        dtype: element type of unencoded KV (`float32`, `bfloat16`, ...).
        model: whose layers they are, as the composition calls it.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    encoding: str
    dtype: str
    model: str = "target"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the KV of a layer: its shape for one block, and its dtype.

    Attributes:
        name: `k`, `v`, `k_scale`, ...: the backend's own.
        shape: of one block; the tensor has an axis of blocks before it.
        dtype: `float32`, `float16`, `bfloat16`, `float64`, `int8`, `uint8`, ...
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
