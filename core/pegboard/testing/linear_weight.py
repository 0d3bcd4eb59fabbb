"""The canonical weight, in the open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.interfaces.quantizer import LinearWeight

if TYPE_CHECKING:
    import torch


def dense(weight: LinearWeight) -> torch.Tensor:
    """The weight in float64, [out_features, in_features], by the formula of `LinearWeight`."""
    import torch

    if weight.values is not None:
        return weight.values.double()
    assert weight.codes is not None and weight.scales is not None
    in_features, num_groups = weight.shape[1], weight.scales.shape[1]
    size = weight.group_size or in_features // num_groups
    group = torch.arange(in_features, device=weight.scales.device) // size
    if weight.group_map is not None:
        group = weight.group_map.long()
    zeros, minima = (
        torch.zeros_like(weight.scales) if numbers is None else numbers
        for numbers in (weight.zeros, weight.minima)
    )
    centred = weight.codes.double() - zeros[:, group].double()
    return centred * weight.scales[:, group].double() + minima[:, group].double()
