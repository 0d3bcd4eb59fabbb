"""Scales moved between a layer's parameters: its outputs stay what they are.

An input x of a linear layer becomes x / s and its weight's columns W * s. The division goes into what
makes x: a norm's weight, or the rows of a linear layer that x is proportional to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pegboard.interfaces.quantizer import StreamedLayer, WeightSpec

_NORMS = {"q_proj": "input_layernorm", "gate_proj": "post_attention_layernorm"}
"""First of the linear layers that share a norm's output, to the norm."""

_LINEARS = {"o_proj": "self_attn.v_proj", "down_proj": "mlp.up_proj"}
"""A linear layer to the one that its inputs are proportional to."""

_ENDS = {"q_proj": "self_attn.o_proj", "gate_proj": "mlp.down_proj"}
"""First of some linear layers to the last of the block that they begin."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A place to which a scale may be moved.

    Attributes:
        weights: linear layers that share an input.
        norm: the norm that makes it, or None.
        linear: the linear layer that it is proportional to, or None.
        end: the linear layer that ends the block which the weights begin: what is made of their
            outputs together can be seen in its own.
    """

    weights: tuple[WeightSpec, ...]
    norm: str | None
    linear: str | None
    end: str


def folds_of(layer: StreamedLayer) -> list[Fold]:
    """The places to which scales may be moved, in order, in a layer with the names of the Llama family. A
    layer with other names has none."""
    found = []
    for weights in layer.groups:
        prefix, last = _split(weights[0].name)
        norm = f"{prefix}.{_NORMS[last]}" if last in _NORMS else None
        if norm is not None and f"{norm}.weight" in layer.parameters:
            found.append(Fold(weights, norm, None, f"{prefix}.{_ENDS[last]}"))
        linear = f"{prefix}.{_LINEARS[last]}" if last in _LINEARS else None
        if linear is not None and _proportional(layer, linear, weights[0]):
            found.append(Fold(weights, None, linear, weights[0].name))
    return found


def fold(layer: StreamedLayer, place: Fold, scales: torch.Tensor) -> None:
    """Multiplies the weights' columns by `scales`, float32 [in_features], and divides what makes their
    inputs."""
    if place.norm is not None:
        scales = _fold_into_norm(layer, place.norm, scales)
    if place.linear is not None:
        _fold_into_rows(layer, place.linear, scales)
    scale_columns(layer, place.weights, scales)


def scale_columns(
    layer: StreamedLayer, weights: Sequence[WeightSpec], scales: torch.Tensor
) -> None:
    """Multiplies the weights' columns by `scales`, [in_features]."""
    for weight in weights:
        name = f"{weight.name}.weight"
        layer.parameters[name] = layer.parameters[name] * scales


def _fold_into_norm(layer: StreamedLayer, norm: str, scales: torch.Tensor) -> torch.Tensor:
    """Divides a norm's weight; returns the scales that it was divided by. It is rounded to few bits, so
    that the type it is stored in does not round it again."""
    name = f"{norm}.weight"
    weight = layer.parameters[name]
    divided = (weight / scales).bfloat16().float()
    done = (divided != 0) & divided.isfinite()
    layer.parameters[name] = torch.where(done, divided, weight)
    return torch.where(done, weight / divided, torch.ones_like(scales))


def _fold_into_rows(layer: StreamedLayer, linear: str, scales: torch.Tensor) -> None:
    layer.parameters[f"{linear}.weight"] = layer.parameters[f"{linear}.weight"] / scales[:, None]
    bias = f"{linear}.bias"
    if bias in layer.parameters:
        layer.parameters[bias] = layer.parameters[bias] / scales


def _proportional(layer: StreamedLayer, linear: str, weight: WeightSpec) -> bool:
    """Whether each input of a weight is one output of the linear layer: heads that share keys and
    values have more inputs than those have outputs."""
    values = layer.parameters.get(f"{linear}.weight")
    return values is not None and len(values) == weight.shape[1]


def _split(name: str) -> tuple[str, str]:
    """The decoder layer's prefix, and the last part of a linear layer's name."""
    block, _, last = name.rpartition(".")
    return block.rpartition(".")[0], last
