"""Writes the GPTQ layout: what `gptq` checkpoints hold of a weight, and what their config says."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from pegboard.errors import ConfigError
from pegboard.interfaces.quantizer import WeightSpec
from pegboard_quant.bitstream import pack
from pegboard_quant.codes import UnsignedCodes
from pegboard_quant.planning import WORD_BITS
from pegboard_quant.rounding import Zeros

SCALES = torch.float16
"""The type that scales are stored in."""


class GroupSettings(Protocol):
    """The settings of a weight that the layout needs."""

    @property
    def bits(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def sym(self) -> bool: ...


def zeros_of(settings: GroupSettings) -> Zeros:
    """The place of the groups' zeros."""
    return "middle" if settings.sym else "fitted"


def check_shape(weight: WeightSpec, settings: GroupSettings) -> None:
    """Checks that groups and words divide a weight.

    Raises:
        ConfigError: they do not.
    """
    out_features, in_features = weight.shape
    keep = f"keep {weight.name} by a recipe's rule"
    if settings.group_size != -1 and in_features % settings.group_size:
        raise ConfigError(
            "group_size",
            f"{settings.group_size} does not divide the {in_features} inputs of {weight.name}",
            allowed="a divisor, or -1 for all inputs",
            fix=f"another size, or {keep}",
        )
    for size, what in ((in_features, "inputs"), (out_features, "outputs")):
        if size * settings.bits % WORD_BITS:
            raise ConfigError(
                "bits",
                f"{settings.bits} bits of {size} {what} of {weight.name} fill no whole words",
                allowed=f"multiples of {WORD_BITS} bits",
                fix=keep,
            )


def stored(codes: UnsignedCodes, *, minus_one: bool) -> dict[str, torch.Tensor]:
    """The tensors of a weight, by `StoredParameter.name`.

    Args:
        codes: scales of type `SCALES`.
        minus_one: zeros are stored less one, as version 1 of the layout does.
    """
    in_features = codes.shape[1]
    zeros = codes.zeros.to(torch.uint8) - int(minus_one)
    groups = codes.group_map
    if groups is None:
        groups = torch.arange(in_features, dtype=torch.int32) // codes.group_size
    return {
        "qweight": pack(codes.values.T.contiguous(), codes.bits, axis=0),
        "qzeros": pack(zeros.T.contiguous(), codes.bits, axis=1),
        "scales": codes.scales.T.contiguous(),
        "g_idx": groups,
    }


def is_first_version(settings: Mapping[str, GroupSettings]) -> bool:
    """Whether the layout's version 1 can hold all weights: it has no zero of 0, which only fitted
    zeros may be. Every reader knows it."""
    return all(one.sym for one in settings.values())


def config_of(
    settings: Mapping[str, GroupSettings], kept: Collection[str], *, act_order: bool
) -> dict[str, Any]:
    """The `quantization_config`.

    Args:
        settings: of each quantized weight, by its name. What most have is said once.
        kept: names of weights that stay as they are.
        act_order: whether groups follow the order in which inputs were quantized.
    """
    forms = {name: (one.bits, one.group_size, one.sym) for name, one in settings.items()}
    common = max(dict.fromkeys(forms.values()), key=list(forms.values()).count)
    bits, group_size, sym = common
    dynamic: dict[str, dict[str, Any]] = {f"-:{_exactly(name)}": {} for name in sorted(kept)}
    for name, form in forms.items():
        if form != common:
            said = dict(zip(("bits", "group_size", "sym"), form, strict=True))
            dynamic[f"+:{_exactly(name)}"] = said
    version = "gptq" if is_first_version(settings) else "gptq_v2"
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": act_order,
        "checkpoint_format": version,
        "lm_head": False,
        "true_sequential": True,
        **({"dynamic": dynamic} if dynamic else {}),
    }


def _exactly(name: str) -> str:
    return f"^{re.escape(name)}$"
