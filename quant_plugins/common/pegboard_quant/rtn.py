"""Rounding to nearest as a method of `pegboard quantize`; written in the GPTQ layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, Field

from pegboard.interfaces.quantizer import Calibrator, QuantizedWeight, WeightSpec
from pegboard_quant import gptq_layout
from pegboard_quant.calibration import Bits, GroupSize, check_values
from pegboard_quant.codes import UnsignedCodes, canonical
from pegboard_quant.planning import code_format
from pegboard_quant.rounding import round_to_nearest
from pegboard_quant.schemes import dequantized


class RTNSettings(BaseModel):
    """Settings of a weight.

    Attributes:
        bits: of a code.
        group_size: inputs that share a scale; -1: all.
        sym: the zero is the middle code; else each group has its own.
    """

    bits: Bits = 4
    group_size: GroupSize = Field(default=64)
    sym: bool = True


class RTNCalibrator(Calibrator):
    """Each code is the nearest one; looks at no inputs."""

    settings: ClassVar[type[BaseModel]] = RTNSettings

    def __init__(self, settings: Mapping[str, RTNSettings], kept: Collection[str]) -> None:
        self._settings = settings
        self._kept = kept
        self._minus_one = gptq_layout.is_first_version(settings)

    @classmethod
    def needs_inputs(cls, settings: RTNSettings) -> bool:
        return False

    def check(self, weight: WeightSpec) -> None:
        gptq_layout.check_shape(weight, self._settings[weight.name])

    def observe(self, weights: Sequence[WeightSpec], inputs: torch.Tensor) -> None: ...

    def quantize(
        self, weights: Sequence[WeightSpec], values: Sequence[torch.Tensor]
    ) -> list[QuantizedWeight]:
        made = []
        for weight, numbers in zip(weights, values, strict=True):
            check_values(weight, numbers)
            codes = rounded(numbers, self._settings[weight.name])
            made.append(quantized(codes, minus_one=self._minus_one))
        return made

    def export(self, stored: Mapping[str, Collection[str]]) -> Mapping[str, Any]:
        return gptq_layout.config_of(self._settings, self._kept, act_order=False)


def rounded(values: torch.Tensor, settings: gptq_layout.GroupSettings) -> UnsignedCodes:
    """The nearest codes of a weight [out, in]."""
    return round_to_nearest(
        values,
        settings.bits,
        settings.group_size,
        gptq_layout.zeros_of(settings),
        gptq_layout.SCALES,
    )


def quantized(codes: UnsignedCodes, *, minus_one: bool, note: str = "") -> QuantizedWeight:
    """A weight in the GPTQ layout, and what it means."""
    weight = canonical(codes, code_format(codes.bits, "float"))
    return QuantizedWeight(
        gptq_layout.stored(codes, minus_one=minus_one), dequantized(weight), note
    )
