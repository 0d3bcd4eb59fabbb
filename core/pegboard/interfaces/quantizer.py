"""`Quantizer`: how a linear layer's weights are stored, and which layers it acts on.

A quantizer's manifest entry names the checkpoint methods it reads (`methods = ["gptq"]`; one layout
of a method that has several is `method/format`, as in `compressed-tensors/pack-quantized`), and three
torch-free functions:

- `parameters(layer, facts) -> tuple[StoredParameter, ...]`, the tensors that a layer has in the
  checkpoint;
- `resident_bytes(layer, facts, dtype, options) -> int`, what it takes in memory;
- `formats(facts, options) -> tuple[str, ...]`, the weight formats that its schemes yield, each of which
  needs a kernel; a list in the manifest where they are always the same.

Three more are optional:

- `kv_scales(facts) -> tuple[StoredKVScales, ...]`, the tensors with static scales of keys and values
  that the checkpoint holds;
- `notes(facts, options) -> tuple[str, ...]`, lines that `pegboard check` shows of how the weights are run;
- `alternatives(facts, options) -> tuple[options, ...]`, complete options that those which leave something
  open (`auto`) may mean, best first. The first is taken for whose formats there are kernels that are more
  than references; where there is none, the last.

`options` are validated by the quantizer's options model; None where it has none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from pegboard.interfaces.checkpoint import CheckpointFacts
    from pegboard.interfaces.model import ParameterKind

VERSION = 2

CODES = ("int8", "uint4", "float8")
"""Kinds of a quantized weight's codes: int8; uint8 of 0 to 15 (fewer bits are fewer values);
float8_e4m3fn."""

ACTIVATIONS = ("float", "static", "dynamic", "grouped")
"""How inputs are quantized before a product; see `LinearWeight.activations`."""


@dataclass(frozen=True, slots=True)
class QuantizerContext:
    """The context of a quantizer's factory, which takes it beside its options.

    Attributes:
        facts: the checkpoint.
        dtype: activation dtype, and that of weights which are not quantized.
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
        shard_axis: for each axis of the layer (`out`, `in`) the axis of this tensor that is split where
            tensor parallelism splits the layer's; None: none is.
        packing: weights in one stored element; 1: not packed.
        packed_axis: the layer's axis that is packed; without a meaning where `packing` is 1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    shard_axis: Mapping[str, int | None] | None = None
    packing: int = 1
    packed_axis: Literal["in", "out"] = "in"


@dataclass(frozen=True, slots=True)
class StoredKVScales:
    """The tensors in which a checkpoint keeps the static scales of a decoder layer's keys and values.

    A tensor holds one number, or one for each KV head. A key is its code times its scale.

    Attributes:
        layer: the decoder layer.
        codes: the kind of code, `float8` or `int8`.
        k, v: names of the tensors; the same one where keys and values share their scales.
    """

    layer: int
    codes: Literal["float8", "int8"]
    k: str
    v: str


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
            token and 32 consecutive inputs (`grouped`). Where there is a `group_map`, consecutive
            means by group: in the order that sorts it, ties as they stand.
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


class StreamedLayer(Protocol):
    """A decoder layer on its own, with what each text of a calibration set brings to it.

    Attributes:
        index: of the layer.
        groups: its linear layers, in the order in which they run, those of one input together.
        parameters: float32 values by full name (`model.layers.0.mlp.up_proj.weight`). What is put in
            their place is what the layer then runs with.
    """

    @property
    def index(self) -> int: ...
    @property
    def groups(self) -> tuple[tuple[WeightSpec, ...], ...]: ...
    @property
    def parameters(self) -> dict[str, torch.Tensor]: ...

    def inputs(self, name: str, num_texts: int | None = None) -> Iterator[torch.Tensor]:
        """A linear layer's inputs, float32 [num_tokens, in_features] of each text.

        Args:
            name: the linear layer's, as `WeightSpec.name`.
            num_texts: only of the first ones; None: of all.
        """

    def outputs(self) -> Iterator[torch.Tensor]:
        """The layer's output, float32 [num_tokens, hidden_size] of each text."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight as a calibrator made it.

    Attributes:
        parameters: what is stored, by `StoredParameter.name`.
        values: float32 [out_features, in_features], `Scheme.dequantize` of the parameters.
        note: a line for the user; empty: none.
    """

    parameters: Mapping[str, torch.Tensor]
    values: torch.Tensor
    note: str = ""


class Calibrator(ABC):
    """How a quantization method makes its own checkpoints, for `pegboard quantize`.

    A quantizer's manifest entry names its class by method: `calibrators = {gptq = "module:Class"}`.

    One decoder layer at a time is in memory: `fold` it; then, for each group of weights that share
    their inputs, `observe` all inputs and `quantize`. Nothing is kept from layer to layer, so that a
    run may stop after any layer and go on later.

    Args:
        settings: of each weight to be quantized, by `WeightSpec.name`: instances of the class's own
            `settings`.
        kept: names of the weights that stay as they are.

    Raises:
        ConfigError: settings that one checkpoint of this method cannot hold together.

    Attributes:
        settings: the pydantic model of a weight's settings.
    """

    settings: ClassVar[Any]

    @abstractmethod
    def __init__(self, settings: Mapping[str, Any], kept: Collection[str]) -> None: ...

    @classmethod
    @abstractmethod
    def needs_inputs(cls, settings: Any) -> bool:
        """Whether a weight of these settings cannot be quantized without inputs."""

    @abstractmethod
    def check(self, weight: WeightSpec) -> None:
        """Called for every weight before any is read.

        Raises:
            ConfigError: the weight's shape does not go with its settings.
        """

    def fold(self, layer: StreamedLayer) -> None:  # noqa: B027 - most methods leave layers as they are
        """Rescales the layer's parameters where its outputs stay what they are."""

    @abstractmethod
    def observe(self, weights: Sequence[WeightSpec], inputs: torch.Tensor) -> None:
        """Takes inputs that these weights share, float32 [num_tokens, in_features]; called once a
        text."""

    @abstractmethod
    def quantize(
        self, weights: Sequence[WeightSpec], values: Sequence[torch.Tensor]
    ) -> list[QuantizedWeight]:
        """Weights that share inputs, from float32 values [out_features, in_features] each and from
        what was observed, which is then forgotten.

        Raises:
            CheckpointError: values or inputs are not finite.
        """

    @abstractmethod
    def export(self, stored: Mapping[str, Collection[str]]) -> Mapping[str, Any]:
        """The `quantization_config` that the checkpoint's config carries.

        Args:
            stored: names of the parameters of each weight that was quantized, by its name.
        """
