"""Paged attention by the native library, straight from the block table.

What it computes and in which order is at the top of `native/attention_tiles.inl`. A step is one call
of the library for each KV group, and one for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pegboard.errors import ConfigError
from pegboard.interfaces.attention import (
    ENCODINGS,
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    RotaryTable,
)
from pegboard_cpu.attention_layout import STORED, layout, padded
from pegboard_cpu.library import FLOAT, POINTER, SIZE, function, pool_of

_HEADS = (POINTER, SIZE, SIZE)  # address, strides of tokens and heads

_ENCODINGS = {"int8": 1, "fp8_e4m3": 2}  # as the library numbers them


class CPUAttention(AttentionBackend):
    """Grouped queries, windows, soft caps, draft trees and LSE in float32; `row_invariant`. KV
    in codes is decoded a tile at a time, and attended over as if it had been kept in float32.

    Attributes:
        handle: what the library knows it by.

    Raises:
        ConfigError: the activation dtype is not float32, or it does not have the KV's encoding.
        OSError: the native library was not built.
    """

    def __init__(self, context: AttentionContext) -> None:
        if context.dtype != "float32":
            raise ConfigError(
                "dtype",
                f"{context.dtype!r} with the cpu attention backend",
                allowed="float32",
                fix="set dtype to float32, or choose another attention backend",
            )
        for group in context.groups:
            layout(group)  # refuses an encoding that this backend does not have
        self._layers = context.layers
        self._groups = context.groups
        self._kv_scales = context.kv_scales
        self._pool = pool_of(context.num_threads)
        self._destroy = function("pb_attention_destroy", None, POINTER)
        self._prepare = function(
            "pb_attention_prepare",
            None,
            *(POINTER, SIZE, SIZE),
            *(POINTER, POINTER, POINTER, POINTER, SIZE, POINTER, SIZE),
        )
        self._forward = function(
            "pb_attention_forward",
            None,
            *(POINTER, SIZE),
            *(*_HEADS, *_HEADS, *_HEADS),
            *(POINTER, POINTER, SIZE, POINTER, POINTER),
        )
        self.handle: int = function("pb_attention_create", POINTER, POINTER)(self._pool.handle)
        self._add_groups()
        self._kv: Sequence[Mapping[str, torch.Tensor]] = ()
        self._fixed: list[torch.Tensor] = []  # the library reads them
        self._step: tuple[torch.Tensor | None, ...] = ()

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._destroy(self.handle)

    def bind(self, kv: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self._kv = kv
        group_of = {layer: g for g, group in enumerate(self._groups) for layer in group.layers}
        add_layer = function(
            "pb_attention_add_layer", None, POINTER, SIZE, SIZE, FLOAT, FLOAT, POINTER, POINTER
        )
        for index, (layer, blocks) in enumerate(zip(self._layers, kv, strict=True)):
            encoding = self._groups[group_of[index]].encoding
            _check(blocks, STORED.get(encoding, "float32"))
            add_layer(
                self.handle,
                group_of[index],
                layer.num_heads,
                layer.scale,
                layer.soft_cap or 0.0,
                blocks["k"].data_ptr(),
                blocks["v"].data_ptr(),
            )
            if encoding != "none":
                self._encode(index, encoding, blocks)

    def _encode(self, layer: int, encoding: str, blocks: Mapping[str, torch.Tensor]) -> None:
        """Tells the library that the layer added last is in codes."""
        encode_layer = function("pb_attention_encode_layer", None, POINTER, SIZE, *(POINTER,) * 4)
        scales, addresses = self._kv_scales.get(layer), [0, 0]
        if scales is not None and scales.codes == ENCODINGS[encoding]:
            fixed = [torch.tensor(of_heads) for of_heads in (scales.k, scales.v)]
            self._fixed += fixed
            addresses = [tensor.data_ptr() for tensor in fixed]
        kept = (blocks["k_scale"].data_ptr(), blocks["v_scale"].data_ptr())
        encode_layer(self.handle, _ENCODINGS[encoding], *kept, *addresses)

    def prepare(self, batch: AttentionBatch) -> None:
        positions = batch.positions.contiguous()
        starts = batch.query_starts.contiguous()
        computed = batch.num_computed.contiguous()
        ancestors = None if batch.ancestors is None else batch.ancestors.contiguous()
        tables = [table.contiguous() for table in batch.block_tables]
        # The library reads them in each layer.
        self._step = (positions, starts, computed, ancestors, *tables)
        for group, table in enumerate(tables):
            self._prepare(
                self.handle,
                group,
                len(computed),
                positions.data_ptr(),
                starts.data_ptr(),
                computed.data_ptr(),
                table.data_ptr(),
                table.shape[1],
                0 if ancestors is None else ancestors.data_ptr(),
                0 if ancestors is None else ancestors.shape[1],
            )

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: RotaryTable | None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, k, v = _dense_heads(q), _dense_heads(k), _dense_heads(v)
        out = torch.empty(q.shape)
        if rotary is None:
            cos, sin, num_pairs = 0, 0, 0
        else:
            cos, sin = rotary.cos.data_ptr(), rotary.sin.data_ptr()
            num_pairs = rotary.cos.shape[1]
        self._forward(
            self.handle,
            layer,
            *(q.data_ptr(), q.stride(0), q.stride(1)),
            *(k.data_ptr(), k.stride(0), k.stride(1)),
            *(v.data_ptr(), v.stride(0), v.stride(1)),
            *(cos, sin, num_pairs),
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
        )
        return out

    def copy_blocks(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        self._move("pb_attention_copy_blocks", group, source, target)

    def move_slots(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        self._move("pb_attention_move_slots", group, source, target)

    def _move(self, name: str, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        source, target = source.contiguous(), target.contiguous()
        move = function(name, None, POINTER, SIZE, SIZE, POINTER, POINTER)
        move(self.handle, group, len(source), source.data_ptr(), target.data_ptr())

    def _add_groups(self) -> None:
        add_group = function("pb_attention_add_group", None, POINTER, *(SIZE,) * 7)
        for group in self._groups:
            add_group(
                self.handle,
                group.num_kv_heads,
                group.head_dim,
                padded(group.head_dim),
                group.block_size,
                group.window or 0,
                max(self._layers[i].num_heads // group.num_kv_heads for i in group.layers),
                self._layers[group.layers[0]].skipped,
            )


def _check(blocks: Mapping[str, torch.Tensor], stored: str) -> None:
    """Raises ValueError when blocks are not what `layout` says of them."""
    for name, tensor in blocks.items():
        dtype = stored if name in ("k", "v") else "float32"
        if not tensor.is_contiguous() or tensor.dtype != getattr(torch, dtype):
            raise ValueError(f"KV blocks {name} are {dtype} and contiguous, not {tensor.dtype}")


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """[num_tokens, heads, head_dim] whose heads lie in one piece each: mostly x itself."""
    return x if x.stride(2) == 1 else x.contiguous()
