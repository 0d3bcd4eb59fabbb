"""Contract suite of the joint operation `decoder_layer`.

    class TestMyDecoderLayer(DecoderLayerContract):
        layout = staticmethod(my_layout)    # of the attention backend

        @pytest.fixture
        def make(self):
            return my_kernel                # called with a KernelContext for each of the family

        @pytest.fixture
        def make_attention(self):
            return MyBackend                # called with an AttentionContext

The reference is the same family, one operation at a time: whether those are right is what their own
suites ask. Outputs, residuals and KV are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pegboard.interfaces.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    RotaryTable,
)
from pegboard.interfaces.decoder_layer import DecoderLayerParts
from pegboard.interfaces.kernel import KernelContext, PackedWeight
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.model import AttentionShape
from pegboard.interfaces.quantizer import LinearWeight
from pegboard.testing.attention import MakeBackend, shape
from pegboard.testing.attention_reference import ReferenceRotary
from pegboard.testing.coded_weights import Form, coded_weight
from pegboard.testing.kernels import KernelContract, MakeKernel

if TYPE_CHECKING:
    import torch

HIDDEN_SIZE, MLP_SIZE, NUM_LAYERS, EPS = 40, 72, 2, 1e-5
BLOCK_SIZE, MAX_BLOCKS, MAX_ROWS = 16, 10, 3


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels and the attention backend that go together, for one activation dtype and one format of
    weights."""

    make: MakeKernel
    make_attention: MakeBackend
    layout: Callable[[KVGroup], Sequence[TensorSpec]]
    dtype: str
    device: str
    format: str

    def kernel(self, operation: str) -> Any:
        """The kernel of an operation."""
        return self.make(KernelContext(operation, self.format, self.dtype, self.device, 1))

    def random(self, *size: int, seed: int) -> torch.Tensor:
        """Normal numbers."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        return values.to(self.device, getattr(torch, self.dtype))


class PagedLayers:
    """Two layers over KV of their own; the same arguments give the same weights.

    Args:
        family: what they run by.
        attention: of both.
        rotary_dim: elements of a head that are rotated; 0: no rotation.

    Attributes:
        parts: of each layer.
        kv: what the blocks hold, by layer and tensor.
    """

    def __init__(self, family: Family, attention: AttentionShape, rotary_dim: int) -> None:
        self.family = family
        self.linear, self.norm = family.kernel("linear"), family.kernel("rms_norm")
        self.silu = family.kernel("silu_mul")
        self._lengths = [0] * MAX_ROWS
        group = KVGroup(
            tuple(range(NUM_LAYERS)),
            attention.num_kv_heads,
            attention.head_dim,
            BLOCK_SIZE,
            attention.window,
            "none",
            family.dtype,
        )
        context = AttentionContext(
            (attention,) * NUM_LAYERS,
            (group,),
            MAX_ROWS,
            family.dtype,
            family.device,
            1,
            ReferenceRotary(),
        )
        self.backend = family.make_attention(context)
        self.kv = [self._blocks(family.layout(group)) for _ in range(NUM_LAYERS)]
        self.backend.bind(self.kv)
        rotary = self._rotary(rotary_dim) if rotary_dim else None
        self.parts = [self._parts(layer, attention, rotary) for layer in range(NUM_LAYERS)]

    def _blocks(self, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        import torch

        blocks = {}
        for spec in specs:
            size = (1 + MAX_ROWS * MAX_BLOCKS, *spec.shape)
            dtype = getattr(torch, spec.dtype)
            blocks[spec.name] = torch.zeros(size, dtype=dtype, device=self.family.device)
        return blocks

    def _rotary(self, rotary_dim: int) -> RotaryTable:
        import torch

        positions = torch.arange(BLOCK_SIZE * MAX_BLOCKS, dtype=torch.float64)
        angles = torch.outer(positions, torch.linspace(1, 0.01, rotary_dim // 2).double())
        dtype = torch.float64 if self.family.dtype == "float64" else torch.float32
        cos, sin = (table.to(self.family.device, dtype) for table in (angles.cos(), angles.sin()))
        return RotaryTable(cos, sin)

    def _parts(
        self, layer: int, attention: AttentionShape, rotary: RotaryTable | None
    ) -> DecoderLayerParts:
        attended = attention.num_heads * attention.head_dim
        joined = attended + 2 * attention.num_kv_heads * attention.head_dim
        return DecoderLayerParts(
            layer,
            attention,
            self.backend,
            rotary,
            qkv=self._weight(joined, HIDDEN_SIZE, seed=layer),
            o=self._weight(HIDDEN_SIZE, attended, seed=10 + layer),
            gate_up=self._weight(2 * MLP_SIZE, HIDDEN_SIZE, seed=20 + layer),
            down=self._weight(HIDDEN_SIZE, MLP_SIZE, seed=30 + layer),
            norm=self.family.random(HIDDEN_SIZE, seed=40 + layer),
            next_norm=self.family.random(HIDDEN_SIZE, seed=60 + layer),
            eps=EPS,
        )

    def _weight(self, out_features: int, in_features: int, seed: int) -> PackedWeight:
        shape = (out_features, in_features)
        if self.family.format == "float":
            values = self.family.random(*shape, seed=seed) / in_features**0.5
            weight = LinearWeight("float", shape, values=values)
        else:
            weight = coded_weight(self.family.format, shape, Form(), self.family.device)
            assert weight.scales is not None
            # codes are the same for all seeds, so scales tell layers apart
            scales = weight.scales * ((1 + seed / 64) / in_features**0.5)
            weight = replace(weight, scales=scales)
        packed: PackedWeight = self.linear.prepare(weight)
        return packed

    def begin(self, row_lengths: Sequence[int]) -> None:
        """Readies a step of so many tokens of each row. Blocks of a row do not follow each other."""
        import torch

        starts = self._lengths[: len(row_lengths)]
        ends = [start + length for start, length in zip(starts, row_lengths, strict=True)]
        positions = [
            torch.arange(start, end, device=self.family.device)
            for start, end in zip(starts, ends, strict=True)
        ]
        blocks = 1 + torch.arange(MAX_ROWS * MAX_BLOCKS, dtype=torch.int32)
        table = blocks.view(MAX_BLOCKS, MAX_ROWS).T[: len(ends)].contiguous()
        self.backend.prepare(
            AttentionBatch(
                positions=torch.cat(positions),
                query_starts=torch.tensor([0, *row_lengths]).cumsum(0),
                num_computed=torch.tensor(starts),
                block_tables=(table.to(self.family.device),),
            )
        )
        self._lengths[: len(ends)] = ends

    def first(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual) before the layers."""
        return self.norm.rms_norm(h, self.parts[0].norm, EPS), h.clone()

    def one_by_one(
        self, parts: DecoderLayerParts, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual) after a layer by the operations that it joins."""
        attention = parts.attention
        heads = [attention.num_heads, attention.num_kv_heads, attention.num_kv_heads]
        qkv = self.linear.linear(hidden, parts.qkv).view(-1, sum(heads), attention.head_dim)
        q, k, v = qkv.split_with_sizes(heads, dim=1)
        attended = self.backend.forward(parts.layer, q, k, v, parts.rotary).flatten(1)
        output = self.linear.linear(attended, parts.o)
        hidden, residual = self.norm.add_rms_norm(output, residual, parts.norm, parts.eps)
        gate, up = self.linear.linear(hidden, parts.gate_up).chunk(2, dim=1)
        output = self.linear.linear(self.silu.silu_mul(gate, up), parts.down)
        normed: tuple[torch.Tensor, torch.Tensor] = self.norm.add_rms_norm(
            output, residual, parts.next_norm, parts.eps
        )
        return normed


class ForeignBackend(AttentionBackend):
    """Another plugin's: no kernel knows its blocks."""

    def bind(self, kv: Any) -> None: ...

    def prepare(self, batch: AttentionBatch) -> None: ...

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        raise NotImplementedError

    def copy_blocks(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None: ...

    def move_slots(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None: ...


class DecoderLayerContract(KernelContract):
    """A joint call has the bits of its operations.

    Attributes:
        shapes: attention under test; without a window where the backend knows none.
    """

    operation = "decoder_layer"
    shapes: ClassVar[tuple[AttentionShape, ...]] = (
        shape(5, 1, 24),
        shape(4, 4, 16),
        shape(6, 2, 64, window=7),
    )

    @staticmethod
    def layout(group: KVGroup) -> Sequence[TensorSpec]:
        """The tensors of a block, as the attention backend's manifest entry gives them."""
        raise NotImplementedError("override `layout`")

    @pytest.fixture
    def make_attention(self) -> MakeBackend:
        """The factory of the attention backend that the kernel goes with."""
        raise NotImplementedError("override the fixture `make_attention`")

    @pytest.fixture
    def families(self, make: MakeKernel, make_attention: MakeBackend) -> list[Family]:
        """The family under test, for each activation dtype and format."""
        return [
            Family(make, make_attention, self.layout, dtype, self.device, format)
            for dtype, format in product(self.dtypes, self.formats)
        ]

    @pytest.mark.parametrize("row_lengths", [(1,), (5,), (130,), (3, 1, 130)], ids=str)
    def test_a_joint_call_is_its_operations(
        self, families: list[Family], row_lengths: tuple[int, ...]
    ) -> None:
        for family in families:
            for attention in self.shapes:
                self.check(family, attention, attention.head_dim, row_lengths)

    @pytest.mark.parametrize("part", ["half", "none"])
    def test_partial_and_no_rotation(self, families: list[Family], part: str) -> None:
        for family in families:
            rotary_dim = self.shapes[0].head_dim // 2 if part == "half" else 0
            self.check(family, self.shapes[0], rotary_dim, (5, 2))

    def test_a_layer_over_a_foreign_attention_backend_is_left_alone(
        self, families: list[Family]
    ) -> None:
        for family in families:
            layers = PagedLayers(family, self.shapes[0], self.shapes[0].head_dim)
            foreign = replace(layers.parts[0], backend=ForeignBackend())
            assert family.kernel("decoder_layer").prepare(foreign) is None

    def check(
        self, family: Family, attention: AttentionShape, rotary_dim: int, row_lengths: Sequence[int]
    ) -> None:
        """Runs a prefill and two tokens more of each row: all layers in a call, then each in a call
        of its own, beside their operations one by one."""
        import torch

        kernel = family.kernel("decoder_layer")
        joint, plain = (PagedLayers(family, attention, rotary_dim) for _ in range(2))
        packed = [kernel.prepare(parts) for parts in joint.parts]
        assert all(layer is not None for layer in packed), "a layer over its own backend is refused"
        ones = [1] * len(row_lengths)
        lengths_of_calls = (
            (row_lengths, [packed]),
            (ones, [packed]),
            (ones, [[p] for p in packed]),
        )
        for step, (lengths, calls) in enumerate(lengths_of_calls):
            h = family.random(sum(lengths), HIDDEN_SIZE, seed=50 + step)
            joint.begin(lengths)
            got = joint.first(h)
            for layers in calls:
                kernel.decoder_layers(layers, *got)
            plain.begin(lengths)
            expected = plain.first(h)
            for parts in plain.parts:
                expected = plain.one_by_one(parts, *expected)
            same = [torch.equal(one, other) for one, other in zip(got, expected, strict=True)]
            assert all(same), f"{family.format}, {attention}, step {step}: {same}"
        for mine, theirs in zip(joint.kv, plain.kv, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs), "KV differs"
