"""Writes layers in the layout `pack-quantized` of compressed-tensors: the inverse of its scheme."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pegboard_gptq.packed_plan import CODES, ZEROS
from pegboard_quant.bitstream import pack
from pegboard_quant.codes import UnsignedCodes


def stored_tensors(
    codes: UnsignedCodes, scale_dtype: torch.dtype, *, symmetric: bool
) -> Mapping[str, torch.Tensor]:
    """A layer's tensors, by the names that checkpoints give them.

    Args:
        codes: of 2 to 8 bits.
        scale_dtype: that scales are stored in; codes should have been chosen for rounded ones.
        symmetric: all zeros are the middle code, and none is stored.
    """
    tensors = {
        CODES: pack(codes.values, codes.bits),
        "weight_scale": codes.scales.to(scale_dtype).contiguous(),
        "weight_shape": torch.tensor(codes.shape),
    }
    if not symmetric:
        tensors[ZEROS] = pack(codes.zeros.to(torch.uint8), codes.bits, axis=0)
    if codes.group_map is not None:
        tensors["weight_g_idx"] = codes.group_map
    return tensors
