"""Round to nearest: codes of a weight from the weight alone."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional as F

from pegboard_quant.codes import UnsignedCodes

Zeros = Literal["middle", "fitted"]
"""The zero of a group: the middle code for all, or the code that the group's least weight needs."""


def round_to_nearest(
    values: torch.Tensor,
    bits: int,
    group_size: int,
    zeros: Zeros,
    scale_dtype: torch.dtype = torch.float32,
) -> UnsignedCodes:
    """Codes of a weight, each the one nearest to it, ties to even.

    A scale is rounded to its stored type first, and codes are chosen for the rounded one. A group of
    zeros gets the scale 1.

    Args:
        values: [out, in], floating.
        bits: of a code, 2 to 8.
        group_size: inputs a group, the last one perhaps shorter; -1: all of a row.
        zeros: `middle`: scale 2 amax / (2**bits - 1), zero 2**(bits - 1); `fitted`: scale
            (max - min) / (2**bits - 1) with 0 in the range, zero round(-min / scale).
        scale_dtype: type that scales are stored in.
    """
    out_features, in_features = values.shape
    size = in_features if group_size == -1 else group_size
    num_groups = -(-in_features // size)
    padded = F.pad(values.float(), (0, num_groups * size - in_features))
    groups = padded.view(out_features, num_groups, size)
    scales, zero = group_parameters(groups, bits, zeros, scale_dtype)
    codes = torch.round(groups / scales.float().unsqueeze(-1)) + zero.unsqueeze(-1)
    codes = codes.clamp_(0, 2**bits - 1).to(torch.uint8).flatten(1)[:, :in_features]
    return UnsignedCodes(codes.contiguous(), bits, scales, zero, size)


def group_parameters(
    groups: torch.Tensor, bits: int, zeros: Zeros, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero of each group.

    Args:
        groups: float32 [..., size]; the rest as `round_to_nearest`.

    Returns:
        Scales in `scale_dtype` and zeros in float32, whole numbers of codes; both [...].
    """
    most = 2**bits - 1
    if zeros == "middle":
        spread = 2 * groups.abs().amax(-1)
    else:
        spread = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
    scales = (spread / most).to(scale_dtype)
    # A scale too small for the stored type would be a division by zero.
    scales = torch.where(scales.float() > 0, scales, torch.ones_like(scales))
    if zeros == "middle":
        return scales, torch.full_like(spread, 2 ** (bits - 1))
    lowest = groups.amin(-1).clamp(max=0)
    return scales, torch.round(-lowest / scales.float()).clamp(0, most)
