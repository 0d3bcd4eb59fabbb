"""`Quantizer`: how a linear layer's weights are stored, and which layers it acts on.

A quantizer's manifest entry names the checkpoint methods it reads (`methods = ["gptq"]`; one layout
of a method that has several is `method/format`, as in `compressed-tensors/pack-quantized`), and three
torch-free functions:

- `parameters(layer, facts) -> tuple[StoredParameter, ...]`, the tensors that a layer has in the
  checkpoint;
- `resident_bytes(layer, facts, dtype, options) -> int`, what it takes in memory;
- `formats(facts, options) -> tuple[str, ...]`, the weight formats that its schemes yield, each of which
  needs a kernel; a list in the manifest where they are always the same.

`options` are validated by the quantizer's options model; None where it has none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from pegboard.interfaces.checkpoint import CheckpointFacts
    from pegboard.interfaces.model import ParameterKind

VERSION = 2

CODES = ("int8", "uint4", "float8")
"""What a quantized weight's codes are: int8; uint8 of 0 to 15 (fewer bits are fewer values);
float8_e4m3fn."""

ACTIVATIONS = ("float", "static", "dynamic", "grouped")
"""How inputs are quantized before a product; see `LinearWeight.activations`."""


@dataclass(frozen=True, slots=True)
class QuantizerContext:
    """What a quantizer's factory gets, beside its options.

    Attributes:
        facts: the checkpoint.
        dtype: activation dtype; what a float weight should come in.
    """

    facts: CheckpointFacts
    dtype: str


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A weight that a quantizer decides on: a linear layer's, an embedding's or the head's.

    Attributes:
        name: the layer's name, without `.weight` (`model.layers.0.mlp.up_proj`).
        shape: [out_features, in_features].
        kind: `linear`, `embedding` or `head`.
    """

    name: str
    shape: tuple[int, int]
    kind: ParameterKind


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """A tensor that a scheme keeps in the checkpoint, declared as data.

    Loading, sharding and planning need nothing else and never know the format.

    Attributes:
        name: appended to the layer's name (`weight`, `qweight`, `scales`).
        shape: as stored.
        dtype: as stored; None: any floating type.
        shard_axis: `out` and `in` axes of the layer map to these axes; None: not split there.
        packing: weights in one stored element; 1: not packed.
        packed_axis: the layer's axis that is packed, `in` or `out`; void when not packed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    shard_axis: Mapping[str, int | None] | None = None
    packing: int = 1
    packed_axis: Literal["in", "out"] = "in"


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The canonical form that every scheme yields after loading and every kernel packs from.

    w[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g] with g = group_map[i], or `values` where the
    weight is float. In float32: the difference is rounded, then the product.

    Attributes:
        format: what kernels register for: `float`, or one of `CODES`, and after a colon the
            activations where they are quantized: `uint4`, `int8:dynamic`, `uint4:grouped`, ...
        shape: [out_features, in_features].
        values: [out, in] float, for format `float`; else None.
        codes: [out, in] uint8, int8 or float8_e4m3fn, one weight an element; None for `float`.
        scales: [out, groups] float32; None for `float`.
        zeros: [out, groups] float32, in codes; None: 0.
        minima: [out, groups] float32, instead of zeros: w = codes * scales + minima, for block formats
            whose minimum is no whole number of scales. The product is rounded, then the sum.
        group_map: int32 [in]; None: consecutive groups of equal size, the last one perhaps shorter
            where `group_size` says so.
        group_size: inputs a group, where the groups do not divide the inputs; None: they do.
        activations: how inputs are quantized before the product, to the codes' kind: not at all
            (`float`); by `input_scale` and `input_zero` (`static`); by a scale of each token, amax / 127
            for int8 and amax / 448 for float8 (`dynamic`); to int8 by a scale, amax / 127, of each
            token and 32 consecutive inputs (`grouped`).
        input_scale: float32 [1], for `static`.
        input_zero: float32 [1], in codes, for `static`; None: 0.
        input_group: for `dynamic`: inputs that share a scale; None: all of a token.
    """

    format: str
    shape: tuple[int, int]
    values: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    minima: torch.Tensor | None = None
    group_map: torch.Tensor | None = None
    group_size: int | None = None
    activations: Literal["float", "static", "dynamic", "grouped"] = "float"
    input_scale: torch.Tensor | None = None
    input_zero: torch.Tensor | None = None
    input_group: int | None = None


class Scheme(ABC):
    """How one weight is stored."""

    @property
    @abstractmethod
    def format(self) -> str:
        """The `LinearWeight.format` that `load` yields; known before any tensor is read."""

    @property
    @abstractmethod
    def parameters(self) -> tuple[StoredParameter, ...]:
        """The stored tensors that `load` takes: what the manifest's `parameters` declares for the
        weight, so that a loader needs to know no format."""

    @abstractmethod
    def load(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        """The canonical weight of the stored parameters, by `StoredParameter.name`.

        The result may alias the parameters.

        Raises:
            CheckpointError: the stored values cannot be right (shapes, non-finite scales).
        """

    @abstractmethod
    def dequantize(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 [out_features, in_features], the reference for every kernel of this scheme."""


class Quantizer(ABC):
    """Decides per weight on a scheme. Its factory takes a `QuantizerContext`."""

    @abstractmethod
    def scheme(self, weight: WeightSpec) -> Scheme:
        """The scheme of a weight. Called once a weight, while layers are built.

        Raises:
            CheckpointError: the weight's stored form is one that this quantizer does not read.
        """


class Calibrator(ABC):
    """How a quantization method makes its own checkpoints, for `pegboard quantize`.

    One layer at a time: `observe` all inputs of a layer's weights, then `quantize` them, so that
    memory is bounded by a layer.
    """

    @abstractmethod
    def observe(self, weight: WeightSpec, inputs: torch.Tensor) -> None:
        """Takes inputs of a weight, [num_tokens, in_features]; called several times a weight."""

    @abstractmethod
    def quantize(self, weight: WeightSpec, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The stored parameters of a weight, by `StoredParameter.name`, from its float values
        [out_features, in_features] and what was observed, which is forgotten."""

    @abstractmethod
    def export(self) -> Mapping[str, Any]:
        """The method's `quantization_config`, as the checkpoint's config carries it."""
