"""Random weights in codes, of every format and in all forms that a checkpoint may give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pegboard.interfaces.quantizer import LinearWeight

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Form:
    """The choices that a format leaves open.

    Attributes:
        group_size: inputs a group; None: one group.
        offset: what a code's value is counted from.
        shuffled: groups are scattered by a `group_map`.
        input_group: as of `LinearWeight`, for dynamic inputs.
        input_zero: whether static inputs have one.
    """

    group_size: int | None = None
    offset: Literal["none", "zeros", "minima"] = "none"
    shuffled: bool = False
    input_group: int | None = None
    input_zero: bool = False


_GROUPS = (Form(8), Form(32), Form(24))
_OFFSETS = (Form(offset="zeros"), Form(32, "zeros"), Form(8, "minima"), Form(24, "minima"))
_SHUFFLED = (Form(8, shuffled=True), Form(24, "zeros", shuffled=True), Form(8, "minima", True))


def forms_of(format: str) -> tuple[Form, ...]:
    """The forms of a format that kernels must know. Groups of 24 leave a short last one in most
    shapes. Float8 has no offsets, and its groups lie in order."""
    kind, _, activations = format.partition(":")
    if kind == "float":
        return (Form(),)
    forms: tuple[Form, ...] = (Form(), *_GROUPS)
    if kind != "float8":
        forms += _OFFSETS + _SHUFFLED
    if activations == "dynamic":
        forms += (Form(input_group=16), Form(24, input_group=32))
    if activations == "static" and kind == "int8":
        forms += (Form(input_zero=True), Form(8, "zeros", input_zero=True))
    return forms


def coded_weight(format: str, shape: tuple[int, int], form: Form, device: str) -> LinearWeight:
    """A weight whose values are of the size of 1; the same one for the same arguments."""
    import torch

    generator = torch.Generator().manual_seed(9)
    kind, _, activations = format.partition(":")
    out_features, in_features = shape
    size = form.group_size or in_features
    num_groups = -(-in_features // size)
    codes = _codes(kind, shape, generator)
    tensors: dict[str, Any] = {"codes": codes}
    step = torch.rand(out_features, num_groups, generator=generator) + 0.5
    tensors["scales"] = step / codes.float().square().mean().sqrt()
    if form.offset == "zeros":
        low, high = (0, 16) if kind == "uint4" else (-64, 64)
        zeros = torch.randint(low, high, step.shape, generator=generator)
        tensors["zeros"] = zeros.float()
    if form.offset == "minima":
        tensors["minima"] = -torch.rand(step.shape, generator=generator) - 0.5
    if form.shuffled:
        places = torch.randperm(in_features, generator=generator)
        tensors["group_map"] = (places // size).int()
    if activations == "static":
        tensors["input_scale"] = torch.tensor([0.03])
        tensors["input_zero"] = torch.tensor([-11.0]) if form.input_zero else None
    return LinearWeight(
        format,
        shape,
        group_size=size if in_features % size and not form.shuffled else None,
        activations=activations or "float",  # type: ignore[arg-type]  # one of those in a format
        input_group=form.input_group,
        **{name: value if value is None else value.to(device) for name, value in tensors.items()},
    )


def _codes(kind: str, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Codes of the whole range."""
    import torch

    if kind == "float8":
        return (
            (torch.randn(shape, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        )
    low, high = (0, 16) if kind == "uint4" else (-128, 128)
    codes = torch.randint(low, high, shape, generator=generator)
    return codes.to(torch.uint8 if kind == "uint4" else torch.int8)
