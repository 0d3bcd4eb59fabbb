"""One decoder layer of any model, run by hand: hidden states in, hidden states out.

The model's own factory builds it, of a shape with that layer alone. Its embedding gives rows of the
hidden states, its last norm hands them on, and its linear layers are plain products that tell their
inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch.nn import functional as F

from pegboard.interfaces.model import Model, ModelShape, ParameterShape
from pegboard.interfaces.quantizer import WeightSpec
from pegboard.models.layers import (
    Attention,
    Embedding,
    LayerBuilder,
    Linear,
    Linears,
    RMSNorm,
    Rotary,
)

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")

OnInput = Callable[[str, torch.Tensor], None]
"""Told the name of a linear layer, and its inputs."""


class Reached(Exception):
    """The linear layer of interest has been reached; the rest of the layer need not run."""


def layer_of(parameter: str) -> int | None:
    """The decoder layer that a parameter is of; None: none."""
    found = _LAYER.search(parameter)
    return None if found is None else int(found[0])


class OneLayer:
    """A decoder layer with its parameters in the open. See `interfaces.quantizer.StreamedLayer`.

    Args:
        index: of the layer.
        parameters: float32 values of all of its parameters, by full name.
        inputs: float32 [num_tokens, hidden_size] for each text.
        builder: of the model's other layers.
        build_model: the model's factory.
        prepare: makes attention ready for one text of so many tokens.
    """

    def __init__(
        self,
        index: int,
        parameters: dict[str, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        builder: LayerBuilder,
        build_model: Callable[[LayerBuilder], Model],
        prepare: Callable[[int], torch.Tensor],
    ) -> None:
        self.index = index
        self.parameters = parameters
        self._inputs = inputs
        self._builder = builder
        self._build_model = build_model
        self._prepare = prepare
        self.groups = self._groups()

    def inputs(self, name: str, num_texts: int | None = None) -> Iterator[torch.Tensor]:
        """A linear layer's inputs, [num_tokens, in_features] of each text."""
        given: list[torch.Tensor] = []

        def until(linear: str, x: torch.Tensor) -> None:
            if linear == name:
                given.append(x)
                raise Reached

        for hidden in self._inputs[:num_texts]:
            try:
                self._run(hidden, until)
            except Reached:
                yield given.pop()

    def outputs(self) -> Iterator[torch.Tensor]:
        """The layer's output, [num_tokens, hidden_size] of each text."""
        for hidden in self._inputs:
            yield self._run(hidden, lambda name, x: None)

    def _run(self, hidden: torch.Tensor, on_input: OnInput) -> torch.Tensor:
        with torch.inference_mode():
            positions = self._prepare(len(hidden))
            model = self._build_model(self._builder_of(hidden, on_input))
            return model.forward(torch.arange(len(hidden)), positions)[0].clone()

    def _groups(self) -> tuple[tuple[WeightSpec, ...], ...]:
        seen: list[tuple[torch.Tensor, list[WeightSpec]]] = []

        def note(name: str, x: torch.Tensor) -> None:
            out_features, in_features = self.parameters[f"{name}.weight"].shape
            spec = WeightSpec(name, (out_features, in_features), "linear")
            if seen and seen[-1][0] is x:
                seen[-1][1].append(spec)
            else:
                seen.append((x, [spec]))

        self._run(torch.zeros(1, self._builder.shape.hidden_size), note)
        return tuple(tuple(specs) for _, specs in seen)

    def _builder_of(self, hidden: torch.Tensor, on_input: OnInput) -> OneLayerBuilder:
        base = self._builder
        values = {one.name: getattr(base, one.name) for one in fields(LayerBuilder) if one.init}
        values |= {
            "shape": _shape_of(base.shape, self.index),
            "linear_kernels": {},
            "kernels": {name: k for name, k in base.kernels.items() if name != "decoder_layer"},
        }
        return OneLayerBuilder(
            **values,
            index=self.index,
            parameters=self.parameters,
            hidden=hidden,
            on_input=on_input,
        )


@dataclass(frozen=True, kw_only=True)
class OneLayerBuilder(LayerBuilder):
    """Builds a model of one layer, whose parameters are given.

    Attributes:
        index: of the layer in the whole model.
        parameters: its values, by the names of the whole model.
        hidden: [num_tokens, hidden_size], the layer's inputs.
        on_input: told of each linear layer's inputs.
    """

    index: int
    parameters: Mapping[str, torch.Tensor]
    hidden: torch.Tensor
    on_input: OnInput

    def linear(self, name: str) -> Linear:
        return _OpenLinear(self._whole(name), self.parameters, self.on_input)

    def linears(self, names: Sequence[str]) -> Linears:
        sizes = [len(self.parameters[f"{self._whole(name)}.weight"]) for name in names]
        return Linears([self.linear(name) for name in names], sizes)

    def embedding(self, name: str) -> Embedding:
        return Embedding(lambda token_ids: self.hidden[token_ids])

    def head(self, name: str) -> Linear:
        return self.linear(name)

    def norm(self, name: str) -> RMSNorm:
        return _NoNorm() if layer_of(f"{name}.weight") is None else super().norm(name)

    def attention_layer(self, layer: int, rotary: Rotary | None) -> Attention:
        return Attention(self.attention, self.index, rotary)

    def _whole(self, name: str) -> str:
        """The name in the whole model."""
        return _LAYER.sub(str(self.index), name)

    def _read(self, name: str) -> torch.Tensor:
        return self.parameters[self._whole(name)]


class _OpenLinear(Linear):
    """A plain product that tells its inputs."""

    def __init__(self, name: str, values: Mapping[str, torch.Tensor], on_input: OnInput) -> None:
        self._name = name
        self._values = values
        self._on_input = on_input

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._on_input(self._name, x)
        bias = self._values.get(f"{self._name}.bias")
        return F.linear(x, self._values[f"{self._name}.weight"], bias)


class _NoNorm(RMSNorm):
    """The identity, in place of a norm."""

    def __init__(self) -> None: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return total, total


def _shape_of(shape: ModelShape, index: int) -> ModelShape:
    """The shape with one layer, under the name of the first."""
    alone: list[ParameterShape] = []
    for parameter in shape.parameters:
        layer = layer_of(parameter.name)
        if layer is None:
            alone.append(parameter)
        elif layer == index:
            alone.append(replace(parameter, name=_LAYER.sub("0", parameter.name)))
    return replace(shape, attention=(shape.attention[index],), parameters=tuple(alone))
