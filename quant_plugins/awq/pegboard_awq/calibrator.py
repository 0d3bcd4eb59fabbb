"""AWQ for `pegboard quantize`; written in the `gemm` layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, Field

from pegboard.errors import ConfigError
from pegboard.interfaces.quantizer import (
    Calibrator,
    QuantizedWeight,
    StreamedLayer,
    WeightSpec,
)
from pegboard_awq.packing import stored_tensors
from pegboard_awq.plan import EACH
from pegboard_awq.search import SCALES, best_scales, clipped, meaning, nearest
from pegboard_quant.calibration import GroupSize, check_inputs, check_values
from pegboard_quant.folding import fold, folds_of

UNCLIPPED = ("q_proj", "k_proj")
"""Layers whose products are multiplied with each other: cutting ranges harms them."""


class AWQSettings(BaseModel):
    """Settings of a weight; the same for all that are quantized.

    Attributes:
        bits: of a code.
        group_size: inputs that share a scale; -1: all.
        search_texts: texts on which scales are compared.
        clip: whether ranges of groups may be cut.
    """

    bits: Literal[4] = 4
    group_size: GroupSize = 64
    search_texts: int = Field(default=4, ge=1)
    clip: bool = True


class AWQCalibrator(Calibrator):
    """Keeps what the inputs of each group are like: those of the weights which are next."""

    settings: ClassVar[type[BaseModel]] = AWQSettings

    def __init__(self, settings: Mapping[str, AWQSettings], kept: Collection[str]) -> None:
        distinct = list({one.model_dump_json(): one for one in settings.values()}.values())
        if len(distinct) > 1:
            raise ConfigError(
                "settings",
                "differ between weights",
                allowed="the same for all that are quantized, in an awq checkpoint",
                fix="set them once, and let rules only keep weights",
            )
        self._settings = distinct[0] if distinct else AWQSettings()
        self._quantized = frozenset(settings)
        self._kept = kept
        self._grams: torch.Tensor | None = None

    @classmethod
    def needs_inputs(cls, settings: AWQSettings) -> bool:
        return True

    def check(self, weight: WeightSpec) -> None:
        out_features, in_features = weight.shape
        size = self._settings.group_size
        keep = f"keep {weight.name} by a recipe's rule"
        if size != -1 and in_features % size:
            raise ConfigError(
                "group_size",
                f"{size} does not divide the {in_features} inputs of {weight.name}",
                allowed="a divisor, or -1 for all inputs",
                fix=f"another size, or {keep}",
            )
        if out_features % EACH:
            raise ConfigError(
                "method",
                f"awq packs {EACH} outputs in a word, and {weight.name} has {out_features}",
                allowed=f"multiples of {EACH}",
                fix=keep,
            )

    def fold(self, layer: StreamedLayer) -> None:
        for place in folds_of(layer):
            if self._quantized.isdisjoint(weight.name for weight in place.weights):
                continue
            size = self._group_size(place.weights[0].shape[1])
            scales = best_scales(layer, place, size, self._settings.search_texts)
            if scales is not None:
                fold(layer, place, scales)

    def observe(self, weights: Sequence[WeightSpec], inputs: torch.Tensor) -> None:
        check_inputs(weights[0], inputs)
        groups = inputs.view(len(inputs), -1, self._group_size(inputs.shape[1])).transpose(0, 1)
        grams = torch.bmm(groups.transpose(1, 2), groups)
        self._grams = grams if self._grams is None else self._grams + grams

    def quantize(
        self, weights: Sequence[WeightSpec], values: Sequence[torch.Tensor]
    ) -> list[QuantizedWeight]:
        grams, self._grams = self._grams, None
        made = []
        for weight, numbers in zip(weights, values, strict=True):
            check_values(weight, numbers)
            size = self._group_size(weight.shape[1])
            cuts = self._settings.clip and weight.name.rpartition(".")[2] not in UNCLIPPED
            if cuts and grams is not None:
                numbers = clipped(numbers, size, grams)
            codes = nearest(numbers, size)
            made.append(QuantizedWeight(stored_tensors(codes, SCALES), meaning(codes)))
        return made

    def export(self, stored: Mapping[str, Collection[str]]) -> Mapping[str, Any]:
        kept = sorted(set(self._kept) - {"lm_head"})
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": self._settings.bits,
            "group_size": self._settings.group_size,
            "zero_point": True,
            "modules_to_not_convert": kept or None,
        }

    def _group_size(self, in_features: int) -> int:
        size = self._settings.group_size
        return in_features if size == -1 else size
