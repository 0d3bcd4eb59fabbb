"""The canonical weight and the product with it, by their plain formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.interfaces.quantizer import LinearWeight

if TYPE_CHECKING:
    import torch


def dense(weight: LinearWeight) -> torch.Tensor:
    """The weight in float64, [out_features, in_features], by the formula of `LinearWeight`: its
    numbers are those of float32."""
    if weight.values is not None:
        return weight.values.double()
    assert weight.codes is not None and weight.scales is not None
    group = group_of_inputs(weight)
    values = weight.codes.float()
    if weight.zeros is not None:
        values = values - weight.zeros[:, group]
    values = values * weight.scales[:, group]
    if weight.minima is not None:
        values = values + weight.minima[:, group]
    return values.double()


def group_of_inputs(weight: LinearWeight) -> torch.Tensor:
    """The group of each input, int64 [in_features]."""
    import torch

    assert weight.scales is not None
    if weight.group_map is not None:
        return weight.group_map.long()
    in_features, num_groups = weight.shape[1], weight.scales.shape[1]
    size = weight.group_size or in_features // num_groups
    return torch.arange(in_features, device=weight.scales.device) // size


def seen_inputs(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """The inputs as a product sees them, float64 [num_rows, in_features]: as they are, or a code
    times its scale; the code is rounded from float32 numbers."""
    import torch

    if weight.activations == "float":
        return x.double()
    order = torch.arange(weight.shape[1], device=x.device)
    if weight.group_map is not None:
        order = torch.sort(weight.group_map, stable=True).indices
    seen = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    sharing = 32 if weight.activations == "grouped" else weight.input_group or weight.shape[1]
    for start in range(0, len(order), sharing):
        block = order[start : start + sharing]
        seen[:, block] = _seen_block(x[:, block].float(), weight)
    return seen


def _seen_block(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """`seen_inputs` for inputs that share a scale; x: float32."""
    import torch

    floats = weight.format.startswith("float8")
    largest = 448.0 if floats else 127.0
    zero = torch.zeros(1, device=x.device)
    if weight.activations == "static":
        assert weight.input_scale is not None
        scale = weight.input_scale.expand(len(x), 1)
        zero = zero if weight.input_zero is None else weight.input_zero
    else:
        scale = x.abs().max(1, keepdim=True).values / largest
    code = (x / scale + zero).nan_to_num(0.0)  # 0 / 0, where all inputs are 0
    if floats:
        code = code.clamp(-largest, largest).to(torch.float8_e4m3fn)
    else:
        code = code.round().clamp(-128, largest) - zero
    return code.double() * scale.double()
