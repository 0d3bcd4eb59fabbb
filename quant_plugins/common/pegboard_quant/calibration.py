"""Functions that calibrators share."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import AfterValidator

from pegboard.errors import CheckpointError
from pegboard.interfaces.quantizer import WeightSpec

Bits = Literal[2, 3, 4, 8]
"""Bits of a code."""


def _group_size(size: int) -> int:
    if size != -1 and size < 1:
        raise ValueError("-1 or a positive number")
    return size


GroupSize = Annotated[int, AfterValidator(_group_size)]
"""Inputs that share a scale; -1: all of a row."""


def check_values(weight: WeightSpec, values: torch.Tensor) -> None:
    """Raises CheckpointError where a weight's numbers are not finite."""
    if not bool(values.isfinite().all()):
        raise CheckpointError(
            f"tensor {weight.name}.weight", "holds numbers that are not finite", fix="get it again"
        )


def check_inputs(weight: WeightSpec, inputs: torch.Tensor) -> None:
    """Raises CheckpointError where what a layer is given is not finite: the model itself is broken."""
    if not bool(inputs.isfinite().all()):
        raise CheckpointError(
            f"inputs of {weight.name}",
            "are not finite",
            fix="the model itself computes nonsense: get its checkpoint again",
        )
