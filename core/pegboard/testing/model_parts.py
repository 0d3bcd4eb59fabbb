"""The parts that a model under test is built on: the formulas in float64, paged KV, plain weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pegboard.interfaces.attention import AttentionBackend, AttentionBatch, RotaryTable
from pegboard.interfaces.checkpoint import CheckpointSource
from pegboard.interfaces.kernel import LinearKernel, PackedWeight, RMSNormKernel, SiluMulKernel
from pegboard.interfaces.model import AttentionShape, ModelShape
from pegboard.interfaces.quantizer import (
    LinearWeight,
    Quantizer,
    Scheme,
    StoredParameter,
    WeightSpec,
)
from pegboard.testing.attention_reference import DenseAttention, rotate_reference
from pegboard.testing.linear_weight import dense

if TYPE_CHECKING:
    import torch

    from pegboard.models.layers import LayerBuilder


def layer_builder(shape: ModelShape, tensors: Mapping[str, torch.Tensor]) -> LayerBuilder:
    """The builder that a factory gets, for a checkpoint of these tensors in float64 on a CPU."""
    from pegboard.models.layers import LayerBuilder

    return LayerBuilder(
        shape=shape,
        source=InMemory(tensors),
        quantizer=Plain(),
        linear_kernels={"float": Product()},
        kernels={"rms_norm": Norm(), "silu_mul": SiluMul()},
        attention=PagedDense(shape.attention),
        dtype="float64",
        device="cpu",
        on_tensor=lambda name: None,
    )


class InMemory(CheckpointSource):
    """Tensors of a dictionary."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor if rows is None else tensor[rows]

    def close(self) -> None:
        pass


class Plain(Quantizer):
    """Every weight as it is."""

    def scheme(self, weight: WeightSpec) -> Scheme:
        return PlainScheme(weight)


class PlainScheme(Scheme):
    """One tensor, `weight`."""

    def __init__(self, weight: WeightSpec) -> None:
        self._shape = weight.shape

    @property
    def format(self) -> str:
        return "float"

    @property
    def parameters(self) -> tuple[StoredParameter, ...]:
        return (StoredParameter("weight", self._shape),)

    def load(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        return LinearWeight("float", self._shape, values=parameters["weight"].double())

    def dequantize(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return parameters["weight"].float()


class Product(LinearKernel):
    """Operation `linear`."""

    gathers = True

    def self_test(self) -> None: ...

    def prepare(self, weight: LinearWeight) -> PackedWeight:
        return PackedWeight(dense(weight))

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        return x @ cast("torch.Tensor", weight).T

    def gather_rows(self, weight: PackedWeight, row_ids: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", weight)[row_ids]


class Norm(RMSNormKernel):
    """Operation `rms_norm`. It overwrites every input that it may."""

    def self_test(self) -> None: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        x.fill_(1e3)
        residual.fill_(1e3)
        return self.rms_norm(total, weight, eps), total


class SiluMul(SiluMulKernel):
    """Operation `silu_mul`. It overwrites every input that it may."""

    def self_test(self) -> None: ...

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        product = gate / (1.0 + (-gate).exp()) * up
        gate.fill_(1e3)
        return product


class PagedDense(AttentionBackend):
    """Dense attention over rows that are told by the first entry of their block table."""

    def __init__(self, layers: Sequence[AttentionShape]) -> None:
        self._layers = layers
        self._rows: dict[tuple[int, int], DenseAttention] = {}
        self._batch: AttentionBatch | None = None

    def bind(self, kv: Sequence[Mapping[str, torch.Tensor]]) -> None: ...

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: RotaryTable | None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        import torch

        batch = self._batch
        assert batch is not None, "the step was not prepared"
        positions = batch.positions
        if rotary is not None:
            q, k = (rotate_reference(x, positions, rotary.cos, rotary.sin) for x in (q, k))
        outputs = []
        for i, table in enumerate(batch.block_tables[0]):
            row = self._row(layer, int(table[0]))
            assert len(row.keys) == int(batch.num_computed[i]), "the layer was run twice, or not"
            for token in range(int(batch.query_starts[i]), int(batch.query_starts[i + 1])):
                row.keys.append(k[token])
                row.values.append(v[token])
                row.positions.append(int(positions[token]))
                seen = range(len(row.keys))
                outputs.append(row.attend(q[token], row.positions[-1], seen)[0])
        return torch.stack(outputs)

    def copy_blocks(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None: ...

    def move_slots(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None: ...

    def _row(self, layer: int, block: int) -> DenseAttention:
        return self._rows.setdefault((layer, block), DenseAttention(self._layers[layer]))


def attention_batch(
    starts: Sequence[int], counts: Sequence[int], blocks: Sequence[int]
) -> AttentionBatch:
    """A step in which row i computes `counts[i]` tokens after its first `starts[i]`."""
    import torch

    positions: list[Any] = [
        position
        for start, count in zip(starts, counts, strict=True)
        for position in range(start, start + count)
    ]
    query_starts = torch.tensor([0, *counts]).cumsum(0)
    return AttentionBatch(
        positions=torch.tensor(positions),
        query_starts=query_starts,
        num_computed=torch.tensor(starts),
        block_tables=(torch.tensor(blocks, dtype=torch.int32)[:, None],),
    )
