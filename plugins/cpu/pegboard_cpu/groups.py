"""Which inputs of a weight share a scale."""

from __future__ import annotations

import torch

from pegboard.interfaces.quantizer import LinearWeight


def group_of_inputs(weight: LinearWeight) -> torch.Tensor:
    """The group of each input, int32 [in_features]."""
    assert weight.scales is not None
    in_features, num_groups = weight.shape[1], weight.scales.shape[1]
    if weight.group_map is not None:
        groups = weight.group_map.to("cpu", torch.int32)
    else:
        size = weight.group_size or in_features // num_groups
        groups = torch.arange(in_features, dtype=torch.int32) // size
        assert groups[-1] == num_groups - 1, f"{num_groups} groups of {size} in {in_features}"
    last = int(groups.max())
    assert groups.min() >= 0 and last < num_groups, f"group {last} of {num_groups}"
    return groups


def groups_in_order(weight: LinearWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Inputs up to the end of each group, int32 [groups], in the order of inputs that sorts the
    groups, int32 [in_features]; None: as they come."""
    assert weight.scales is not None
    groups = group_of_inputs(weight)
    ends = torch.bincount(groups, minlength=weight.scales.shape[1]).cumsum(0).int()
    if bool((groups.diff() >= 0).all()):
        return ends, None
    return ends, groups.argsort(stable=True).int()
