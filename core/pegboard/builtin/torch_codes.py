"""Weights in codes and rounded inputs in plain torch: the arithmetic of every weight format.

Formats whose inputs stay float are products with the dequantized weight. Where inputs are quantized
to int8, a product is a sum over *pieces*: runs of inputs that share a group of the weight and a scale
of the input. Within a piece everything is whole numbers and exact; then, in float32 and in the order
of the inputs,

    y = fma(sum of q * (code - zero), d * scale, y)
    y = fma(sum of q, d * minimum, y)                       where the weight has minima

with d the input's scale. Inputs quantized to float8 are products of the dequantized weight with the
rounded inputs, q * d.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.nn import functional as F

from pegboard.interfaces.quantizer import LinearWeight

GROUPED_INPUTS = 32
"""Inputs that share a scale in `grouped`."""

INT8_MAX, FLOAT8_MAX = 127, 448


@dataclass(frozen=True, slots=True)
class Piece:
    """Inputs [start, stop) of one group of the weight and one scale of the input, in `Codes.order`."""

    start: int
    stop: int
    group: int
    block: int


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight in codes, with what a product needs to know of its groups.

    Attributes:
        weight: as it came, on the device.
        groups: int64 [in_features], the group of each input.
        order: int64 [in_features], inputs by group: the order in which a weight with a `group_map`
            takes them, and in which those are consecutive that share a scale of the input.
        block_size: inputs that share a scale of the input.
        pieces: in ascending order.
    """

    weight: LinearWeight
    groups: torch.Tensor
    order: torch.Tensor
    block_size: int
    pieces: tuple[Piece, ...]


def codes_of(weight: LinearWeight, device: torch.device) -> Codes:
    """Moves a weight to the device."""
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    tensors: dict[str, Any] = {
        name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)
    }
    moved = replace(weight, **tensors)
    in_features = weight.shape[1]
    groups = input_groups(weight)
    order = groups.argsort(stable=True)
    size = {"grouped": GROUPED_INPUTS, "dynamic": weight.input_group}.get(weight.activations)
    size = size or in_features
    pieces = _pieces(groups[order], size)
    return Codes(moved, groups.to(device), order.to(device), size, pieces)


def input_groups(weight: LinearWeight) -> torch.Tensor:
    """The group of each input, int64 [in_features], on the CPU."""
    if weight.group_map is not None:
        return weight.group_map.cpu().long()
    assert weight.scales is not None
    in_features, num_groups = weight.shape[1], weight.scales.shape[1]
    size = weight.group_size or in_features // num_groups
    groups = torch.arange(in_features) // size
    assert int(groups[-1]) == num_groups - 1, f"{num_groups} groups of {size} in {in_features}"
    return groups


def _pieces(groups: torch.Tensor, block_size: int) -> tuple[Piece, ...]:
    blocks = torch.arange(len(groups)) // block_size
    changes = (groups.diff() != 0) | (blocks.diff() != 0)
    starts = [0, *(changes.nonzero().flatten() + 1).tolist()]
    stops = [*starts[1:], len(groups)]
    return tuple(
        Piece(start, stop, int(groups[start]), int(blocks[start]))
        for start, stop in zip(starts, stops, strict=True)
    )


def dequantize(weight: LinearWeight, groups: torch.Tensor) -> torch.Tensor:
    """float32 [out_features, in_features], by the formula of `LinearWeight`."""
    assert weight.codes is not None and weight.scales is not None
    values = weight.codes.float()
    if weight.zeros is not None:
        values = values - weight.zeros[:, groups]
    values = values * weight.scales[:, groups]
    return values if weight.minima is None else values + weight.minima[:, groups]


def rows_of(weight: LinearWeight, row_ids: torch.Tensor) -> LinearWeight:
    """The weight of some output features, int64 [num_rows]."""
    per_row = ("codes", "scales", "zeros", "minima")
    some = {name: getattr(weight, name) for name in per_row}
    rows: dict[str, Any] = {
        name: None if whole is None else whole[row_ids] for name, whole in some.items()
    }
    return replace(weight, shape=(len(row_ids), weight.shape[1]), **rows)


def input_scales(x: torch.Tensor, codes: Codes, largest: int) -> torch.Tensor:
    """d, float32 [num_rows, blocks], of inputs in `codes.order`, whose codes are at most `largest`."""
    weight = codes.weight
    if weight.activations == "static":
        assert weight.input_scale is not None, "static activations without an input scale"
        return weight.input_scale.expand(len(x), 1)
    size = codes.block_size
    blocks = F.pad(x, (0, -x.shape[1] % size)).view(len(x), -(-x.shape[1] // size), size)
    return blocks.abs().amax(-1).div(largest)


def to_int8(x: torch.Tensor, scale: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """Whole numbers q with q * scale near x: int8 codes minus the input's zero; ties to even.

    Args:
        x: float32 [num_rows, n].
        scale: float32 [num_rows, 1]; 0: all q are 0.
        weight: tells static inputs, whose codes have a zero and reach from -128 to 127.
    """
    q = torch.where(scale == 0, 0, x / scale)
    if weight.activations != "static":
        return q.round().clamp(-INT8_MAX, INT8_MAX)
    zero = 0 if weight.input_zero is None else weight.input_zero
    return (q + zero).round().clamp(-INT8_MAX - 1, INT8_MAX) - zero


def to_float8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """q * scale in float32, q = x / scale rounded to e4m3; `scale` as of `to_int8`."""
    q = torch.where(scale == 0, 0, x / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX)
    return q.to(torch.float8_e4m3fn).float() * scale


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of float32 numbers, rounded once."""
    product, c = a.double() * b.double(), c.double()  # exact
    total = product + c
    # what that sum left out (Knuth, The Art of Computer Programming 2, 4.2.2)
    part = total - product
    error = (product - (total - part)) + (c - part)
    # an inexact sum is made odd, so that rounding it once more sees on which side of a half it lay
    # (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008)
    even = total.view(torch.int64) & 1 == 0
    odd = total.nextafter(error.sign() * torch.inf)
    return torch.where(even & (error.abs() > 0), odd, total).float()
