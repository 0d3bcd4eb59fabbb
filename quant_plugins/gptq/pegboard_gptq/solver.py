"""GPTQ (arXiv 2210.17323): codes chosen one input after the other, what each rounds off made good by
the inputs that are still to come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from pegboard_quant.codes import UnsignedCodes
from pegboard_quant.rounding import Zeros, group_parameters

BLOCK = 128
"""Inputs whose corrections are applied to the rest of the weight together."""


ActOrder = bool | Literal["static"]
"""Whether inputs are taken by falling diagonal of the Hessian, and groups formed in that order; `static`:
taken so, but groups are of neighbours, and their scales those of the weight as it was."""


Parameters = tuple[torch.Tensor, torch.Tensor]
"""Scale and zero of a group, [out] each."""


class NotPositiveDefinite(Exception):
    """The Hessian has no Cholesky factor."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Which numbers a weight may be rounded to; see `rounding.group_parameters`."""

    bits: int
    group_size: int
    zeros: Zeros
    scale_dtype: torch.dtype


class Hessian:
    """H = 2/n sum x xᵀ over inputs: of |Wx - Qx|² by a row of W. float64 [in, in]."""

    def __init__(self, in_features: int) -> None:
        self._sum = torch.zeros(in_features, in_features, dtype=torch.float64)
        self._count = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Takes inputs, float32 [num_tokens, in_features]."""
        self._sum += (inputs.T @ inputs).double()
        self._count += len(inputs)

    @property
    def matrix(self) -> torch.Tensor:
        """A new one."""
        return self._sum * (2.0 / max(self._count, 1))


def solve(
    values: torch.Tensor, hessian: torch.Tensor, grid: Grid, *, damping: float, act_order: ActOrder
) -> UnsignedCodes:
    """Codes of a weight that make |Wx - Qx|² small over the inputs of a Hessian.

    Args:
        values: [out, in], floating.
        hessian: float64 [in, in].
        grid: of the codes.
        damping: added to the Hessian's diagonal, in parts of its mean.
        act_order: in which order.

    Raises:
        NotPositiveDefinite: even with the damping.
    """
    weights, hessian = values.double().clone(), hessian.clone()
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1.0
    weights[:, dead] = 0.0
    in_features = weights.shape[1]
    size = in_features if grid.group_size == -1 else grid.group_size
    order = torch.arange(in_features)
    if act_order:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    back = torch.argsort(order)
    factor = inverse_factor(hessian[order][:, order], damping)
    groups = None
    if act_order == "static":
        fixed = [_parameters(weights, first, size, grid) for first in range(0, in_features, size)]
        codes, parameters = _sweep(weights[:, order], factor, grid, size, (order // size, fixed))
    else:
        codes, parameters = _sweep(weights[:, order], factor, grid, size)
        groups = (back // size).to(torch.int32) if act_order else None
    scales, zeros = (torch.stack(column, dim=1) for column in zip(*parameters, strict=True))
    return UnsignedCodes(codes[:, back].contiguous(), grid.bits, scales, zeros, size, groups)


def inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """U, upper, with UᵀU the inverse of the damped Hessian; float64 [in, in].

    Raises:
        NotPositiveDefinite: there is none.
    """
    damped = hessian.clone()
    damped.diagonal().add_(damping * hessian.diagonal().mean())
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        raise NotPositiveDefinite
    upper: torch.Tensor
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if int(failed) or not bool(upper.isfinite().all()):
        raise NotPositiveDefinite
    return upper


def _sweep(
    weights: torch.Tensor,
    factor: torch.Tensor,
    grid: Grid,
    size: int,
    fixed: tuple[torch.Tensor, list[Parameters]] | None = None,
) -> tuple[torch.Tensor, list[Parameters]]:
    """Codes uint8 [out, in], and each group's parameters. `weights` is void afterwards.

    Args:
        weights: float64 [out, in], in the order in which inputs are taken.
        factor: of their Hessian.
        grid: of the codes.
        size: of a group of inputs that follow each other.
        fixed: the group of each input, and parameters, where these are known before.
    """
    in_features = weights.shape[1]
    codes = torch.empty(weights.shape, dtype=torch.uint8)
    group_of, parameters = (torch.arange(in_features) // size, []) if fixed is None else fixed
    for first, stop in _blocks(in_features, size):
        errors = torch.empty(len(weights), stop - first, dtype=torch.float64)
        for at in range(first, stop):
            if fixed is None and at % size == 0:
                # A block begins no later than its first group: all corrections so far are in.
                parameters.append(_parameters(weights, at, size, grid))
            step, zero = (one.double() for one in parameters[int(group_of[at])])
            column = weights[:, at]
            code = (torch.round(column / step) + zero).clamp_(0, 2**grid.bits - 1)
            codes[:, at] = code.to(torch.uint8)
            error = (column - (code - zero) * step) / factor[at, at]
            weights[:, at:stop] -= torch.outer(error, factor[at, at:stop])
            errors[:, at - first] = error
        weights[:, stop:] -= errors @ factor[first:stop, stop:]
    return codes, parameters


def _parameters(weights: torch.Tensor, first: int, size: int, grid: Grid) -> Parameters:
    """Scale and zero of the group of inputs that begins there."""
    group = weights[:, first : first + size].float()
    return group_parameters(group, grid.bits, grid.zeros, grid.scale_dtype)


def _blocks(in_features: int, group_size: int) -> list[tuple[int, int]]:
    """Blocks of at most `BLOCK` inputs, none of which ends inside a group that began in it, unless the
    group is larger than a block and began with it."""
    if group_size <= BLOCK:
        length = group_size * (BLOCK // group_size)
        starts = list(range(0, in_features, length))
    else:
        starts = [
            start
            for group in range(0, in_features, group_size)
            for start in range(group, min(group + group_size, in_features), BLOCK)
        ]
    return list(zip(starts, [*starts[1:], in_features], strict=True))
