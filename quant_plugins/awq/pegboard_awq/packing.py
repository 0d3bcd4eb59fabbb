"""How the version `gemm` packs: eight outputs a word, in the order that its kernel wants them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pegboard_awq.plan import BITS, CODES, EACH
from pegboard_quant.bitstream import pack, unpack
from pegboard_quant.codes import UnsignedCodes

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word, from its lowest bits, is of output ORDER[i] of its eight."""


def unpack_outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, out / 8] -> uint8 [rows, out], outputs in their own order."""
    nibbles = unpack(words, BITS, words.shape[1] * EACH).view(len(words), -1, EACH)
    place_of = [ORDER.index(output) for output in range(EACH)]
    return nibbles[:, :, place_of].flatten(1)


def pack_outputs(codes: torch.Tensor) -> torch.Tensor:
    """The inverse: uint8 [rows, out] -> int32 [rows, out / 8]."""
    nibbles = codes.reshape(len(codes), -1, EACH)[:, :, list(ORDER)]
    return pack(nibbles.flatten(1), BITS)


def stored_tensors(codes: UnsignedCodes, scale_dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """A layer's tensors, by the names that checkpoints give them.

    Args:
        codes: of 4 bits, in consecutive groups; outputs are a multiple of 8.
        scale_dtype: that scales are stored in; codes should have been chosen for rounded ones.
    """
    assert codes.bits == BITS and codes.group_map is None
    return {
        CODES: pack_outputs(codes.values.T),
        "qzeros": pack_outputs(codes.zeros.T.to(torch.uint8)),
        "scales": codes.scales.T.to(scale_dtype).contiguous(),
    }
