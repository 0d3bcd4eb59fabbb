"""Options that quantizers share. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard_quant.keys import undeclared_notes

Activations = Literal["float", "int8"]
"""Inputs of weights in codes: floats, or quantized in groups of 32 of a token."""

GroupSize = Literal[-1] | Annotated[int, Field(ge=32, multiple_of=32)]
"""Inputs that share a scale; -1: all of a row."""


class ActivationOptions(BaseModel):
    """`quantizer: {name: ..., options: {activations: float | int8}}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    activations: Activations = "float"


def activation_notes(facts: CheckpointFacts, options: ActivationOptions) -> tuple[str, ...]:
    """Notes on inputs of weights in codes that are quantized, and on unknown settings."""
    unknown = undeclared_notes(facts)
    if options.activations == "float":
        return tuple(unknown)
    said = "inputs of weights in codes are quantized to int8, in groups of 32 of a token"
    return (f"{said}; activations: float keeps them as they are", *unknown)


class RoundingOptions(ActivationOptions):
    """Options of a quantizer that rounds weights while it loads them.

    Attributes:
        group_size: inputs that share a scale.
        embedding: whether the embedding and the output head are rounded too.
    """

    group_size: GroupSize = 64
    embedding: bool = False


class CheckpointOptions(BaseModel):
    """Options of a quantizer whose checkpoints say how inputs are quantized.

    Attributes:
        activations: `checkpoint`: as they say; `float`: not at all, only weights are in codes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    activations: Literal["checkpoint", "float"] = "checkpoint"
