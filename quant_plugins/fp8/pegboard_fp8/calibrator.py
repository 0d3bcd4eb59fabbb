"""Float8 for `pegboard quantize`; written in the `float-quantized` layout of compressed-tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, model_validator
from torch.nn import functional as F

from pegboard.interfaces.quantizer import Calibrator, QuantizedWeight, WeightSpec
from pegboard_fp8.e4m3 import MAX, to_e4m3
from pegboard_quant import compressed_export
from pegboard_quant.calibration import check_inputs, check_values

SCALES = torch.bfloat16
"""The type that scales are stored in. A model of any type holds these numbers as they are."""

BLOCK = 128
"""Rows and columns of a weight, and inputs of a token, that share a scale in blocks."""


class FP8Settings(BaseModel):
    """Settings of a weight.

    Attributes:
        weights: what shares a scale: the whole weight (`tensor`), a row (`channel`), or a square of
            `BLOCK` rows and columns (`block`).
        activations: scales of inputs by token (`dynamic`), in blocks by token and `BLOCK` inputs; or
            one for all (`static`); `none`: inputs stay float.
    """

    weights: Literal["tensor", "channel", "block"] = "channel"
    activations: Literal["dynamic", "static", "none"] = "dynamic"

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.weights == "block" and self.activations == "static":
            raise ValueError("weights in blocks have dynamic inputs")
        return self


class FP8Calibrator(Calibrator):
    """Keeps the largest of the inputs: those of the weights which are next."""

    settings: ClassVar[type[BaseModel]] = FP8Settings

    def __init__(self, settings: Mapping[str, FP8Settings], kept: Collection[str]) -> None:
        self._settings = settings
        self._kept = kept
        self._largest = 0.0

    @classmethod
    def needs_inputs(cls, settings: FP8Settings) -> bool:
        return settings.activations == "static"

    def check(self, weight: WeightSpec) -> None: ...

    def observe(self, weights: Sequence[WeightSpec], inputs: torch.Tensor) -> None:
        check_inputs(weights[0], inputs)
        self._largest = max(self._largest, float(inputs.abs().amax()))

    def quantize(
        self, weights: Sequence[WeightSpec], values: Sequence[torch.Tensor]
    ) -> list[QuantizedWeight]:
        input_scale = _stored_scale(torch.tensor([self._largest]))
        self._largest = 0.0
        made = []
        for weight, numbers in zip(weights, values, strict=True):
            check_values(weight, numbers)
            settings = self._settings[weight.name]
            parameters, meaning = _quantized(numbers, _block(settings, weight))
            if settings.weights == "tensor":
                parameters["weight_scale"] = parameters["weight_scale"].reshape(1)
            if settings.activations == "static":
                parameters["input_scale"] = input_scale.clone()
            made.append(QuantizedWeight(parameters, meaning))
        return made

    def export(self, stored: Mapping[str, Collection[str]]) -> Mapping[str, Any]:
        forms = {name: _form(self._settings[name]) for name in stored}
        return compressed_export.config_of("float-quantized", forms, self._kept)


def _block(settings: FP8Settings, weight: WeightSpec) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    out_features, in_features = weight.shape
    blocks = {
        "tensor": (out_features, in_features),
        "channel": (1, in_features),
        "block": (BLOCK, BLOCK),
    }
    return blocks[settings.weights]


def _quantized(
    values: torch.Tensor, block: tuple[int, int]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Codes and scales [row blocks, column blocks] of a weight, and float32 what they mean."""
    rows, columns = block
    out_features, in_features = values.shape
    padded = F.pad(values.abs(), (0, -in_features % columns, 0, -out_features % rows))
    blocks = padded.view(len(padded) // rows, rows, -1, columns)
    scales = _stored_scale(blocks.amax((1, 3)))
    spread = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    spread = spread[:out_features, :in_features]
    codes = to_e4m3(values / spread)
    return {"weight": codes, "weight_scale": scales}, codes.float() * spread


def _stored_scale(amax: torch.Tensor) -> torch.Tensor:
    """Scales of the largest numbers, of their shape; 1 where those are 0."""
    scales = (amax / MAX).to(SCALES)
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def _form(settings: FP8Settings) -> tuple[compressed_export.Args, compressed_export.Args | None]:
    in_blocks = settings.weights == "block"
    sizes: dict[str, Any] = {"block_structure": [BLOCK, BLOCK]} if in_blocks else {}
    weights = compressed_export.args("float", settings.weights, **sizes)
    if settings.activations == "none":
        return weights, None
    if settings.activations == "static":
        return weights, compressed_export.args("float", "tensor")
    if in_blocks:
        return weights, compressed_export.args("float", "group", dynamic=True, group_size=BLOCK)
    return weights, compressed_export.args("float", "token", dynamic=True)
