"""Tokens that see only themselves: what a backend gives for each is its value, as blocks give it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pegboard.interfaces.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    KVScales,
)
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.model import AttentionShape
from pegboard.testing.attention_reference import ReferenceRotary

if TYPE_CHECKING:
    import torch


def values_alone(
    make: Callable[[AttentionContext], AttentionBackend],
    layout: Callable[[KVGroup], Sequence[TensorSpec]],
    group: KVGroup,
    values: torch.Tensor,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Attention of rows of one token each, with queries and keys of zero: `values` as read back.

    Args:
        make, layout: of the backend.
        group: of one layer.
        values: [num_rows, num_kv_heads, head_dim], on the device.
        scales: static ones.
    """
    import torch

    num_rows, heads, head_dim = values.shape
    context = AttentionContext(
        layers=(AttentionShape(heads, heads, head_dim, 1.0),),
        groups=(group,),
        max_num_seqs=num_rows,
        dtype=group.dtype,
        device=values.device.type,
        num_threads=1,
        rotary=ReferenceRotary(),
        kv_scales={} if scales is None else {0: scales},
    )
    backend = make(context)
    shapes = {spec.name: ((num_rows + 1, *spec.shape), spec.dtype) for spec in layout(group)}
    backend.bind(
        [
            {
                name: torch.zeros(shape, dtype=getattr(torch, dtype), device=values.device)
                for name, (shape, dtype) in shapes.items()
            }
        ]
    )
    table = torch.arange(1, num_rows + 1, dtype=torch.int32, device=values.device)
    backend.prepare(
        AttentionBatch(
            positions=torch.zeros(num_rows, dtype=torch.int64, device=values.device),
            query_starts=torch.arange(num_rows + 1),
            num_computed=torch.zeros(num_rows, dtype=torch.int64),
            block_tables=(table[:, None],),
        )
    )
    nothing = torch.zeros_like(values)
    return backend.forward(0, nothing, nothing, values, None)
