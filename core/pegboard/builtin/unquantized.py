"""Plain weights: the checkpoint's floating tensors, in the activation dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pegboard.builtin.unquantized_plan import parameters
from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.dtypes import FLOAT_BYTES
from pegboard.interfaces.quantizer import (
    LinearWeight,
    Quantizer,
    QuantizerContext,
    Scheme,
    StoredParameter,
    WeightSpec,
)


class Unquantized(Quantizer):
    """Gives every weight the format `float`."""

    def __init__(self, context: QuantizerContext) -> None:
        self._facts = context.facts
        self._dtype: torch.dtype = getattr(torch, context.dtype)

    def scheme(self, weight: WeightSpec) -> Scheme:
        _check(f"{weight.name}.weight", weight.shape, self._facts)
        return _PlainScheme(weight, parameters(weight, self._facts), self._dtype)


@dataclass(frozen=True, slots=True)
class _PlainScheme(Scheme):
    weight: WeightSpec
    stored: tuple[StoredParameter, ...]
    dtype: torch.dtype

    @property
    def format(self) -> str:
        return "float"

    @property
    def parameters(self) -> tuple[StoredParameter, ...]:
        return self.stored

    def load(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        values = parameters["weight"].to(self.dtype)
        return LinearWeight("float", self.weight.shape, values=values)

    def dequantize(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return parameters["weight"].float()


def _check(name: str, shape: tuple[int, int], facts: CheckpointFacts) -> None:
    """Raises CheckpointError unless the checkpoint has the weight, plain and of that shape."""
    tensor, fact = f"tensor {name}", facts.tensors.get(name)
    if fact is None:
        raise CheckpointError(tensor, f"missing in {facts.path}")
    if fact.format != "plain" or fact.dtype not in FLOAT_BYTES:
        stored_as = fact.dtype if fact.format == "plain" else fact.format
        raise CheckpointError(
            tensor,
            f"stored as {stored_as}",
            allowed=", ".join(FLOAT_BYTES),
            fix="choose a quantizer that reads it",
        )
    if fact.shape != shape:
        raise CheckpointError(tensor, f"shape {list(fact.shape)}", allowed=f"{list(shape)}")
