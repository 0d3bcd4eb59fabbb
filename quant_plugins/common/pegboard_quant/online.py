"""Quantizers that round the weights of a plain checkpoint while they load them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pegboard.interfaces.quantizer import (
    LinearWeight,
    Quantizer,
    QuantizerContext,
    Scheme,
    StoredParameter,
    WeightSpec,
)
from pegboard_quant.checks import check_finite
from pegboard_quant.codes import canonical
from pegboard_quant.online_plan import INT8_BITS, W4_BITS, is_rounded, parameters
from pegboard_quant.options import RoundingOptions
from pegboard_quant.planning import code_format, is_plain, missing_weight
from pegboard_quant.rounding import Zeros, round_to_nearest
from pegboard_quant.schemes import FloatScheme, StoredScheme


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rounding of weights; see `round_to_nearest`."""

    bits: int
    zeros: Zeros


INT8 = Rounding(INT8_BITS, "middle")
W4 = Rounding(W4_BITS, "fitted")


class OnlineQuantizer(Quantizer):
    """Rounds to nearest, a weight at a time."""

    def __init__(
        self, context: QuantizerContext, options: RoundingOptions, rounding: Rounding
    ) -> None:
        self._facts = context.facts
        self._dtype: torch.dtype = getattr(torch, context.dtype)
        self._options = options
        self._rounding = rounding

    def scheme(self, weight: WeightSpec) -> Scheme:
        stored = parameters(weight, self._facts)
        if not is_plain(weight, self._facts):
            raise missing_weight(weight, self._facts)
        if not is_rounded(weight, self._options):
            return FloatScheme(weight, stored, self._dtype)
        return _RoundedScheme(weight, stored, self._options, self._rounding)


class _RoundedScheme(StoredScheme):
    def __init__(
        self,
        weight: WeightSpec,
        stored: tuple[StoredParameter, ...],
        options: RoundingOptions,
        rounding: Rounding,
    ) -> None:
        super().__init__(weight, stored, code_format(rounding.bits, options.activations))
        self._group_size = options.group_size
        self._rounding = rounding

    def canonical(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        values = parameters["weight"]
        check_finite(f"{self.weight.name}.weight", values)
        rounding = self._rounding
        codes = round_to_nearest(values, rounding.bits, self._group_size, rounding.zeros)
        return canonical(codes, self.format)
