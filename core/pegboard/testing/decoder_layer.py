"""Contract suite of the joint operation `decoder_layer`.

    class TestMyDecoderLayer(DecoderLayerContract):
        layout = staticmethod(my_layout)    # of the attention backend

        @pytest.fixture
        def make(self):
            return my_kernel                # called with a KernelContext, for each of the family

        @pytest.fixture
        def make_attention(self):
            return MyBackend                # called with an AttentionContext

The reference is the family itself, one operation at a time: whether those are right is what their own
suites ask. Outputs, residuals and KV are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pegboard.interfaces.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
)
from pegboard.interfaces.kernel import (
    DecoderLayerKernel,
    DecoderLayerParts,
    LinearKernel,
    PackedWeight,
    RMSNormKernel,
    SiluMulKernel,
)
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.model import AttentionShape
from pegboard.testing.attention import MakeBackend, shape
from pegboard.testing.attention_reference import ReferenceRotary
from pegboard.testing.kernels import KernelContract, MakeKernel

if TYPE_CHECKING:
    import torch

HIDDEN_SIZE, MLP_SIZE, NUM_LAYERS = 40, 72, 2
BLOCK_SIZE, MAX_POSITION = 16, 160


@dataclass(frozen=True, slots=True)
class Operations:
    """What a layer runs by, where it is not joined."""

    linear: LinearKernel
    norm: RMSNormKernel
    silu: SiluMulKernel


class PagedLayers:
    """Two layers over KV of their own.

    Attributes:
        parts: of each layer.
        kv: what the pages hold, by layer and tensor.
    """

    def __init__(
        self,
        operations: Operations,
        backend: AttentionBackend,
        kv: Sequence[dict[str, torch.Tensor]],
        parts: Sequence[DecoderLayerParts],
    ) -> None:
        self.parts = parts
        self.kv = kv
        self._operations = operations
        self._backend = backend
        self._lengths: list[int] = []
        backend.bind(kv)

    def begin(self, row_lengths: Sequence[int]) -> int:
        """Readies a step of so many tokens of each row; returns how many that is."""
        import torch

        lengths = self._lengths or [0] * len(row_lengths)
        ends = [start + count for start, count in zip(lengths, row_lengths, strict=True)]
        positions = [p for start, end in zip(lengths, ends, strict=True) for p in range(start, end)]
        device = self.parts[0].norm.device
        pages = torch.arange(1, 1 + len(ends) * (MAX_POSITION // BLOCK_SIZE), dtype=torch.int32)
        self._backend.prepare(
            AttentionBatch(
                positions=torch.tensor(positions, device=device),
                query_starts=torch.tensor([0, *row_lengths]).cumsum(0),
                num_computed=torch.tensor(lengths),
                # A row's pages do not follow each other.
                block_tables=(pages.view(-1, len(ends)).T.contiguous().to(device),),
            )
        )
        self._lengths = ends
        return len(positions)

    def joint(
        self, kernel: DecoderLayerKernel, layers: Sequence[PackedWeight], x: torch.Tensor
    ) -> list[torch.Tensor]:
        """Each layer's output and residual, each layer in one call."""
        results: list[torch.Tensor] = []
        hidden, residual = self._first(x)
        for packed in layers:
            output = kernel.decoder_layer(packed, hidden, residual)
            results += [output.clone(), residual.clone()]
            hidden, residual = self._next(output, residual)
        return results

    def one_by_one(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The same, by the operations that a layer joins."""
        run, results = self._operations, list[Any]()
        hidden, residual = self._first(x)
        for parts in self.parts:
            heads, kv_heads = parts.attention.num_heads, parts.attention.num_kv_heads
            qkv = run.linear.linear(hidden, parts.qkv)
            heads_of_qkv = qkv.view(qkv.shape[0], -1, parts.attention.head_dim)
            q, k, v = heads_of_qkv.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
            attended = parts.backend.forward(parts.layer, q, k, v, parts.rotary).flatten(1)
            hidden, residual = run.norm.add_rms_norm(
                run.linear.linear(attended, parts.o), residual, parts.norm, parts.eps
            )
            gate, up = run.linear.linear(hidden, parts.gate_up).chunk(2, dim=1)
            output = run.linear.linear(run.silu.silu_mul(gate, up), parts.down)
            results += [output.clone(), residual.clone()]
            hidden, residual = self._next(output, residual)
        return results

    def _first(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm, eps = self.parts[0].norm, self.parts[0].eps
        return self._operations.norm.rms_norm(x.clone(), norm, eps), x.clone()

    def _next(
        self, output: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm, eps = self.parts[0].norm, self.parts[0].eps
        return self._operations.norm.add_rms_norm(output, residual, norm, eps)


class ForeignBackend(AttentionBackend):
    """Of another plugin: nobody's kernel knows its pages."""

    def bind(self, kv: Any) -> None: ...
    def prepare(self, batch: AttentionBatch) -> None: ...
    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        raise NotImplementedError

    def copy_blocks(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None: ...
    def move_slots(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None: ...


class DecoderLayerContract(KernelContract):
    """A joint call is its operations.

    Attributes:
        shapes: attention of layers under test; without a window for a backend that has none.
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

    @pytest.mark.parametrize("row_lengths", [(1,), (5,), (130,), (3, 1, 130)], ids=str)
    def test_a_joint_call_has_the_bits_of_its_operations(
        self, make: MakeKernel, make_attention: MakeBackend, row_lengths: tuple[int, ...]
    ) -> None:
        for dtype in self.dtypes:
            for attention in self.shapes:
                self.check(make, make_attention, dtype, attention, 1, row_lengths)

    @pytest.mark.parametrize("part", ["half", "none"])
    def test_partial_and_no_rotation(
        self, make: MakeKernel, make_attention: MakeBackend, part: str
    ) -> None:
        rotated = 0.5 if part == "half" else 0.0
        self.check(make, make_attention, self.dtypes[0], self.shapes[0], rotated, (5,))

    def test_a_layer_over_a_foreign_attention_backend_is_left_alone(
        self, make: MakeKernel, make_attention: MakeBackend
    ) -> None:
        for dtype in self.dtypes:
            kernel = self.kernel(make, dtype)
            layers = self.layers(make, make_attention, dtype, self.shapes[0])
            foreign = replace(layers.parts[0], backend=ForeignBackend())
            assert kernel.prepare(foreign) is None

    def check(
        self,
        make: MakeKernel,
        make_attention: MakeBackend,
        dtype: str,
        attention: AttentionShape,
        rotated: float,
        row_lengths: Sequence[int],
    ) -> None:
        """A prefill and two steps that decode, in both ways."""
        import torch

        kernel = self.kernel(make, dtype)
        joined, plain = (
            self.layers(make, make_attention, dtype, attention, rotated) for _ in range(2)
        )
        packed = [kernel.prepare(parts) for parts in joined.parts]
        assert all(layer is not None for layer in packed), "a layer of its own backend is refused"
        for step, counts in enumerate([row_lengths, *[[1] * len(row_lengths)] * 2]):
            assert joined.begin(counts) == plain.begin(counts)
            x = self.random(sum(counts), HIDDEN_SIZE, dtype=dtype, seed=20 + step)
            expected = plain.one_by_one(x)
            got = joined.joint(kernel, packed, x)
            names = [f"{name} {i}" for i in range(NUM_LAYERS) for name in ("output", "residual")]
            for name, one, other in zip(names, got, expected, strict=True):
                assert torch.equal(one, other), f"{dtype}, {attention}, step {step}: {name}"
        for mine, theirs in zip(joined.kv, plain.kv, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs), "other KV"

    def layers(
        self,
        make: MakeKernel,
        make_attention: MakeBackend,
        dtype: str,
        attention: AttentionShape,
        rotated: float = 1.0,
    ) -> PagedLayers:
        """Two layers; the same arguments give the same weights.

        Args:
            rotated: share of a head's elements that are rotated.
        """
        import torch

        group = KVGroup(
            tuple(range(NUM_LAYERS)),
            attention.num_kv_heads,
            attention.head_dim,
            BLOCK_SIZE,
            attention.window,
            "none",
            dtype,
        )
        shapes = (attention,) * NUM_LAYERS
        backend = make_attention(
            AttentionContext(shapes, (group,), 4, dtype, self.device, 1, ReferenceRotary())
        )
        num_pages = 1 + 4 * (MAX_POSITION // BLOCK_SIZE)
        kv = [
            {
                spec.name: torch.zeros(
                    num_pages, *spec.shape, dtype=getattr(torch, spec.dtype), device=self.device
                )
                for spec in self.layout(group)
            }
            for _ in shapes
        ]
        operations = self.operations(make, dtype)
        table = self.rotary(dtype, round(attention.head_dim * rotated) // 2)
        parts = [
            self.parts(operations.linear, backend, attention, layer, table, dtype)
            for layer in range(NUM_LAYERS)
        ]
        return PagedLayers(operations, backend, kv, parts)
