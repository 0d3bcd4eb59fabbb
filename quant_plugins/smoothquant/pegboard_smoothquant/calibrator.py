"""SmoothQuant (arXiv 2211.10438) for `pegboard quantize`: weights and inputs in 8 bits; written in the
`int-quantized` layout of compressed-tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, Field

from pegboard.interfaces.quantizer import (
    Calibrator,
    QuantizedWeight,
    StreamedLayer,
    WeightSpec,
)
from pegboard_quant import compressed_export
from pegboard_quant.calibration import check_inputs, check_values
from pegboard_quant.folding import Fold, fold, folds_of

SCALES = torch.bfloat16
"""The type that scales are stored in. A model of any type holds these numbers as they are."""

MOST = 127
SAMPLE = 512
"""Inputs that static and dynamic rounding are compared on."""

_LEAST = 1e-5


class SmoothQuantSettings(BaseModel):
    """Settings of a weight.

    Attributes:
        alpha: how much of the inputs' outliers goes into the weights; 0: inputs and weights stay.
        weights: what shares a scale: a row (`channel`) or the whole weight (`tensor`).
        activations: scales of inputs by token (`dynamic`), or one for all (`static`); `auto`: static
            where it was measured to be as good.
        static_error: most squared error of a static product, as a multiple of the dynamic one's, that
            `auto` takes for as good.
    """

    alpha: float = Field(default=0.8, ge=0, le=1)
    weights: Literal["channel", "tensor"] = "channel"
    activations: Literal["dynamic", "static", "auto"] = "dynamic"
    static_error: float = Field(default=1.5, ge=0)


class SmoothQuantCalibrator(Calibrator):
    """Keeps the largest of the inputs, and a sample of them: those of the weights which are next."""

    settings: ClassVar[type[BaseModel]] = SmoothQuantSettings

    def __init__(self, settings: Mapping[str, SmoothQuantSettings], kept: Collection[str]) -> None:
        self._settings = settings
        self._kept = kept
        self._largest = 0.0
        self._sample: list[torch.Tensor] = []

    @classmethod
    def needs_inputs(cls, settings: SmoothQuantSettings) -> bool:
        return True

    def check(self, weight: WeightSpec) -> None: ...

    def fold(self, layer: StreamedLayer) -> None:
        for place in folds_of(layer):
            chosen = [self._settings[w.name] for w in place.weights if w.name in self._settings]
            alpha = max((one.alpha for one in chosen), default=0.0)
            if place.norm is not None and alpha > 0:
                fold(layer, place, _scales(layer, place, alpha))

    def observe(self, weights: Sequence[WeightSpec], inputs: torch.Tensor) -> None:
        check_inputs(weights[0], inputs)
        self._largest = max(self._largest, float(inputs.abs().amax()))
        room = SAMPLE - sum(len(part) for part in self._sample)
        if room > 0:
            self._sample.append(inputs[:room].clone())

    def quantize(
        self, weights: Sequence[WeightSpec], values: Sequence[torch.Tensor]
    ) -> list[QuantizedWeight]:
        pairs = zip(weights, values, strict=True)
        made = [self._quantized(weight, numbers) for weight, numbers in pairs]
        self._largest, self._sample = 0.0, []
        return made

    def export(self, stored: Mapping[str, Collection[str]]) -> Mapping[str, Any]:
        forms = {}
        for name, parameters in stored.items():
            static = "input_scale" in parameters
            inputs = compressed_export.args(
                "int", "tensor" if static else "token", dynamic=not static
            )
            weights = compressed_export.args("int", self._settings[name].weights)
            forms[name] = (weights, inputs)
        return compressed_export.config_of("int-quantized", forms, self._kept)

    def _quantized(self, weight: WeightSpec, values: torch.Tensor) -> QuantizedWeight:
        check_values(weight, values)
        settings = self._settings[weight.name]
        amax = values.abs().amax() if settings.weights == "tensor" else values.abs().amax(1)
        scales = _stored_scale(amax)
        codes = _codes(values, scales.float()[:, None])
        meaning = codes.float() * scales.float()[:, None]
        parameters = {
            "weight": codes,
            "weight_scale": scales if settings.weights == "tensor" else scales[:, None],
        }
        static = _stored_scale(torch.tensor(self._largest))
        if settings.activations == "static":
            return QuantizedWeight({**parameters, "input_scale": static}, meaning)
        if settings.activations == "dynamic":
            return QuantizedWeight(parameters, meaning)
        ratio = self._error_ratio(meaning, float(static))
        is_safe = ratio <= settings.static_error
        chosen = {**parameters, "input_scale": static} if is_safe else parameters
        kind = "static" if is_safe else "dynamic"
        note = f"{weight.name}: {kind} inputs (static error {ratio:.2f} times the dynamic one)"
        return QuantizedWeight(chosen, meaning, note)

    def _error_ratio(self, meaning: torch.Tensor, static: float) -> float:
        """Squared error of a product with static inputs over that with dynamic ones."""
        inputs = torch.cat(self._sample)
        by_token = inputs.abs().amax(1, keepdim=True) / MOST
        dynamic = torch.where(by_token > 0, by_token, torch.ones_like(by_token))
        errors = [
            ((inputs - _codes(inputs, scale).float() * scale) @ meaning.T).double().square().sum()
            for scale in (torch.tensor(static), dynamic)
        ]
        least = torch.finfo(torch.float64).tiny
        return float(errors[0] / errors[1].clamp(min=least))


def _scales(layer: StreamedLayer, place: Fold, alpha: float) -> torch.Tensor:
    """Factors of the weights' columns, float32 [in]."""
    inputs = torch.full((place.weights[0].shape[1],), _LEAST)
    for x in layer.inputs(place.weights[0].name):
        inputs = torch.maximum(inputs, x.abs().amax(0))
    rows = torch.cat([layer.parameters[f"{weight.name}.weight"] for weight in place.weights])
    weights = rows.abs().amax(0).clamp(min=_LEAST)
    return (inputs**alpha / weights ** (1 - alpha)).clamp(min=_LEAST)


def _stored_scale(amax: torch.Tensor) -> torch.Tensor:
    """Scales of the largest numbers, [n]; 1 where those are 0."""
    scales = (amax.reshape(-1) / MOST).to(SCALES)
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def _codes(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.round(numbers / scale).clamp_(-MOST, MOST).to(torch.int8)
