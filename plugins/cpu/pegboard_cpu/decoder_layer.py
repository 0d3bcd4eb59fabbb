"""Decoder layers in one call of the library: the same operations, without Python between them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from typing import cast

import torch

from pegboard.interfaces.attention import (
    AttentionBatch,
    AttentionContext,
    RotaryTable,
)
from pegboard.interfaces.decoder_layer import DecoderLayerKernel, DecoderLayerParts
from pegboard.interfaces.kernel import KernelContext, PackedWeight
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.model import AttentionShape
from pegboard.interfaces.quantizer import LinearWeight
from pegboard_cpu.attention import CPUAttention
from pegboard_cpu.attention_layout import layout
from pegboard_cpu.elementwise import CPURMSNorm, CPURotary, CPUSiluMul
from pegboard_cpu.library import FLOAT, POINTER, SIZE, function
from pegboard_cpu.linear import CPULinear
from pegboard_cpu.weight import NativeWeight


class _Layer:
    """A layer of the library, and what it points to."""

    def __init__(self, handle: int, parts: DecoderLayerParts, attention: int) -> None:
        self.handle = handle
        self.attention = attention
        self.hidden_size = parts.norm.shape[0]
        self._parts = parts
        self._destroy = function("pb_decoder_layer_destroy", None, POINTER)

    def __del__(self) -> None:
        self._destroy(self.handle)


class CPUDecoderLayer(DecoderLayerKernel):
    """Layers over this package's own attention backend; between the operations of a layer, activations
    stay in memory that all layers share."""

    def __init__(self, context: KernelContext) -> None:
        self._context = context
        self._create = function(
            "pb_decoder_layer_create",
            POINTER,
            *(SIZE,) * 4,
            *(POINTER,) * 4,
            *(POINTER, POINTER, FLOAT),
            *(POINTER, POINTER, SIZE),
        )
        self._run = function(
            "pb_decoder_layers", None, *(POINTER, SIZE, POINTER, POINTER), *(SIZE, POINTER, POINTER)
        )
        self._destroy = function("pb_workspace_destroy", None, POINTER)
        self._workspace: int = function("pb_workspace_create", POINTER)()

    def __del__(self) -> None:
        if hasattr(self, "_workspace"):
            self._destroy(self._workspace)

    def prepare(self, parts: DecoderLayerParts) -> PackedWeight | None:
        weights = (parts.qkv, parts.o, parts.gate_up, parts.down)
        if not isinstance(parts.backend, CPUAttention):
            return None
        qkv, o, gate_up, down = (cast(NativeWeight, weight) for weight in weights)
        rotary, shape = parts.rotary, parts.attention
        attended = shape.num_heads * shape.head_dim
        hidden_size, mlp_size = qkv.in_features, down.in_features
        sizes = [(weight.out_features, weight.in_features) for weight in (qkv, o, gate_up, down)]
        assert sizes == [
            (attended + 2 * shape.num_kv_heads * shape.head_dim, hidden_size),
            (hidden_size, attended),
            (2 * mlp_size, hidden_size),
            (hidden_size, mlp_size),
        ], f"weights of {sizes} make no layer of {shape}"
        for norm in (parts.norm, parts.next_norm):
            assert norm.is_contiguous() and norm.shape == (hidden_size,)
        handle = self._create(
            *(parts.layer, shape.num_heads, shape.num_kv_heads, shape.head_dim),
            *(qkv.handle, o.handle, gate_up.handle, down.handle),
            *(parts.norm.data_ptr(), parts.next_norm.data_ptr(), parts.eps),
            *((0, 0, 0) if rotary is None else _addresses(rotary)),
        )
        return PackedWeight(_Layer(handle, parts, parts.backend.handle))

    def decoder_layers(
        self, layers: Sequence[PackedWeight], hidden: torch.Tensor, residual: torch.Tensor
    ) -> None:
        run = cast(Sequence[_Layer], layers)
        assert hidden.shape == residual.shape and hidden.shape[1] == run[0].hidden_size
        assert hidden.dtype == residual.dtype == torch.float32
        assert hidden.is_contiguous() and residual.is_contiguous(), "rows do not lie together"
        self._run(
            (c_void_p * len(run))(*(layer.handle for layer in run)),
            len(run),
            run[0].attention,
            self._workspace,
            hidden.shape[0],
            hidden.data_ptr(),
            residual.data_ptr(),
        )

    def self_test(self) -> None:
        shape = AttentionShape(num_heads=3, num_kv_heads=1, head_dim=8, scale=0.4)
        tile = _Tile(self._context, shape, hidden_size=20, mlp_size=33)
        hidden = torch.linspace(-1, 1, 5 * 20).view(5, 20)
        expected, residual = tile.one_by_one(hidden.clone(), hidden.clone())
        packed = self.prepare(tile.parts)
        assert packed is not None
        got, total = hidden.clone(), hidden.clone()
        self.decoder_layers([packed], got, total)
        assert torch.equal(got, expected) and torch.equal(total, residual), "a layer is wrong"


class _Tile:
    """A small layer over a sequence of five tokens, for the self-test."""

    def __init__(
        self, context: KernelContext, shape: AttentionShape, hidden_size: int, mlp_size: int
    ) -> None:
        group = KVGroup((0,), shape.num_kv_heads, shape.head_dim, 16, None, "none", "float32")
        self.linear, self.norm = CPULinear(context), CPURMSNorm(context)
        self.silu = CPUSiluMul(context)
        self.shape = shape
        backend = CPUAttention(
            AttentionContext(
                (shape,), (group,), 1, "float32", "cpu", context.num_threads, CPURotary(context)
            )
        )
        backend.bind([{spec.name: torch.zeros(2, *spec.shape) for spec in layout(group)}])
        backend.prepare(
            AttentionBatch(
                positions=torch.arange(5),
                query_starts=torch.tensor([0, 5]),
                num_computed=torch.tensor([0]),
                block_tables=(torch.tensor([[1]], dtype=torch.int32),),
            )
        )
        attended = shape.num_heads * shape.head_dim
        angles = torch.outer(torch.arange(5.0), torch.arange(1.0, 5.0))
        self.parts = DecoderLayerParts(
            0,
            shape,
            backend,
            RotaryTable(angles.cos(), angles.sin()),
            self._weight(attended + 2 * shape.num_kv_heads * shape.head_dim, hidden_size),
            self._weight(hidden_size, attended),
            self._weight(2 * mlp_size, hidden_size),
            self._weight(hidden_size, mlp_size),
            torch.linspace(0.5, 1.5, hidden_size),
            torch.linspace(1.5, 0.5, hidden_size),
            1e-5,
        )

    def _weight(self, out_features: int, in_features: int) -> PackedWeight:
        values = torch.arange(out_features * in_features).view(out_features, in_features)
        values = (values % 13 - 6) / 16
        shape = (out_features, in_features)
        return self.linear.prepare(LinearWeight("float", shape, values=values))

    def one_by_one(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer by the operations that it joins."""
        parts, shape = self.parts, self.shape
        qkv = self.linear.linear(hidden, parts.qkv).view(5, -1, shape.head_dim)
        q, k, v = torch.split_with_sizes(
            qkv, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1
        )
        attended = parts.backend.forward(0, q, k, v, parts.rotary).flatten(1)
        output = self.linear.linear(attended, parts.o)
        hidden, residual = self.norm.add_rms_norm(output, residual, parts.norm, parts.eps)
        gate, up = self.linear.linear(hidden, parts.gate_up).chunk(2, dim=1)
        output = self.linear.linear(self.silu.silu_mul(gate, up), parts.down)
        return self.norm.add_rms_norm(output, residual, parts.next_norm, parts.eps)


def _addresses(rotary: RotaryTable) -> tuple[int, int, int]:
    return rotary.cos.data_ptr(), rotary.sin.data_ptr(), rotary.cos.shape[1]
