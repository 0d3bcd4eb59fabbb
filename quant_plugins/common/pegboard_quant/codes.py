"""Unsigned codes of a weight, between the bit streams of files and the canonical form."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pegboard.errors import CheckpointError
from pegboard.interfaces.quantizer import LinearWeight
from pegboard_quant.checks import check_range
from pegboard_quant.planning import ACTIVATION_BLOCK

_HALF_BYTE = 4
_SIGN = 128


@dataclass(frozen=True, slots=True)
class UnsignedCodes:
    """w[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g], with g the group of input i.

    Attributes:
        values: uint8 [out, in], each below 2**bits.
        bits: of a code, 1 to 8.
        scales: [out, groups], floating.
        zeros: whole numbers, [out, groups].
        group_size: inputs a group, the last one perhaps shorter.
        group_map: int32 [in], instead of consecutive groups; None: those.
    """

    values: torch.Tensor
    bits: int
    scales: torch.Tensor
    zeros: torch.Tensor
    group_size: int
    group_map: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""
        out_features, in_features = self.values.shape
        return out_features, in_features


def canonical(codes: UnsignedCodes, weight_format: str) -> LinearWeight:
    """Codes as a canonical weight, of which up to 4 bits are `uint4` and more are `int8`.

    Args:
        codes: what was stored or rounded.
        weight_format: by `planning.code_format` of the same bits.
    """
    in_features = codes.shape[1]
    values, zeros = codes.values, codes.zeros.float()
    if codes.bits > _HALF_BYTE:
        values, zeros = (values ^ _SIGN).view(torch.int8), zeros - _SIGN
    divides = in_features % codes.group_size == 0 or codes.group_map is not None
    return LinearWeight(
        weight_format,
        codes.shape,
        codes=values.contiguous(),
        scales=codes.scales.float().contiguous(),
        zeros=zeros.contiguous() if bool(zeros.any()) else None,
        group_map=codes.group_map,
        group_size=None if divides else codes.group_size,
        activations="grouped" if weight_format.endswith(":grouped") else "float",
    )


def group_map_of(
    name: str, stored: torch.Tensor, group_size: int, *, blocks: bool
) -> torch.Tensor | None:
    """The group of each input, int32 [in]; None where groups are consecutive after all.

    Args:
        name: of the tensor.
        stored: int32 [in].
        group_size: inputs a group.
        blocks: whether each group must be of whole blocks of quantized activations.

    Raises:
        CheckpointError: it names a group that there is not, or groups are of odd sizes for `blocks`.
    """
    in_features = len(stored)
    consecutive = torch.arange(in_features, dtype=torch.int32) // group_size
    if torch.equal(stored, consecutive):
        return None
    check_range(name, stored, 0, int(consecutive[-1]))
    sizes = torch.bincount(stored)[:-1] if blocks else torch.zeros(1)
    if bool((sizes % ACTIVATION_BLOCK != 0).any()):
        raise CheckpointError(
            f"tensor {name}",
            f"has groups that are no multiples of {ACTIVATION_BLOCK} inputs",
            fix="quantizer.options.activations: float",
        )
    return stored
