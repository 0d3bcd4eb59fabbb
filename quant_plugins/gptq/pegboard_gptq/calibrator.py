"""GPTQ for `pegboard quantize`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, Field

from pegboard.errors import ConfigError
from pegboard.interfaces.quantizer import Calibrator, QuantizedWeight, WeightSpec
from pegboard_gptq.solver import ActOrder, Grid, Hessian, NotPositiveDefinite, solve
from pegboard_quant import gptq_layout
from pegboard_quant.calibration import Bits, GroupSize, check_inputs, check_values
from pegboard_quant.rtn import quantized, rounded

LADDER = (1.0, 10.0, 100.0)
"""Factors of the damping that are tried, one after the other, until the Hessian is positive definite."""


class GPTQWeightSettings(BaseModel):
    """Settings of a weight.

    Attributes:
        bits: of a code.
        group_size: inputs that share a scale; -1: all.
        sym: the zero is the middle code; else each group has its own.
        act_order: inputs are quantized by falling importance, and groups formed of those that then follow
            each other; `static`: groups are of neighbours all the same. The same for all weights.
        damping: added to the Hessian's diagonal, in parts of its mean.
    """

    bits: Bits = 4
    group_size: GroupSize = 64
    sym: bool = True
    act_order: ActOrder = "static"
    damping: float = Field(default=0.01, gt=0, le=1)


class GPTQCalibrator(Calibrator):
    """Keeps one Hessian: that of the weights which are next."""

    settings: ClassVar[type[BaseModel]] = GPTQWeightSettings

    def __init__(self, settings: Mapping[str, GPTQWeightSettings], kept: Collection[str]) -> None:
        if len({one.act_order for one in settings.values()}) > 1:
            raise ConfigError(
                "act_order", "differs between weights", fix="set it once, outside the rules"
            )
        self._settings = settings
        self._kept = kept
        self._minus_one = gptq_layout.is_first_version(settings)
        self._hessian: Hessian | None = None

    @classmethod
    def needs_inputs(cls, settings: GPTQWeightSettings) -> bool:
        return True

    def check(self, weight: WeightSpec) -> None:
        gptq_layout.check_shape(weight, self._settings[weight.name])

    def observe(self, weights: Sequence[WeightSpec], inputs: torch.Tensor) -> None:
        check_inputs(weights[0], inputs)
        if self._hessian is None:
            self._hessian = Hessian(inputs.shape[1])
        self._hessian.add(inputs)

    def quantize(
        self, weights: Sequence[WeightSpec], values: Sequence[torch.Tensor]
    ) -> list[QuantizedWeight]:
        observed = self._hessian or Hessian(weights[0].shape[1])
        self._hessian = None
        hessian = observed.matrix
        pairs = zip(weights, values, strict=True)
        return [self._quantized(weight, numbers, hessian) for weight, numbers in pairs]

    def export(self, stored: Mapping[str, Collection[str]]) -> Mapping[str, Any]:
        act_order = any(one.act_order is True for one in self._settings.values())
        damping = max(one.damping for one in self._settings.values())
        config = gptq_layout.config_of(self._settings, self._kept, act_order=act_order)
        return {**config, "damp_percent": damping}

    def _quantized(
        self, weight: WeightSpec, values: torch.Tensor, hessian: torch.Tensor
    ) -> QuantizedWeight:
        check_values(weight, values)
        settings = self._settings[weight.name]
        zeros = gptq_layout.zeros_of(settings)
        grid = Grid(settings.bits, settings.group_size, zeros, gptq_layout.SCALES)
        for factor in LADDER:
            damping = settings.damping * factor
            try:
                codes = solve(values, hessian, grid, damping=damping, act_order=settings.act_order)
            except NotPositiveDefinite:
                continue
            note = "" if factor == 1 else f"{weight.name}: needed a damping of {damping:g}"
            return quantized(codes, minus_one=self._minus_one, note=note)
        note = (
            f"{weight.name}: its inputs tell too little (Hessian not positive definite with a damping"
            f" of {damping:g}): rounded to nearest"
        )
        return quantized(rounded(values, settings), minus_one=self._minus_one, note=note)
