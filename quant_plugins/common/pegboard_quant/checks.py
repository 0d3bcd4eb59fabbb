"""Whether stored tensors can be right: shapes, types, numbers. All raise one-line CheckpointErrors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pegboard.errors import CheckpointError
from pegboard.interfaces.quantizer import StoredParameter

GET_AGAIN = "get the checkpoint again, or quantize it anew"

_E4M3_NAN = 0x7F


def check_stored(
    layer: str, stored: Sequence[StoredParameter], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Checks that the tensors of a layer are those that were declared.

    Args:
        layer: its name.
        stored: what was declared.
        tensors: what was read, by `StoredParameter.name`.

    Raises:
        CheckpointError: one is missing, or of another shape or type.
    """
    for parameter in stored:
        name = f"{layer}.{parameter.name}"
        if parameter.name not in tensors:
            raise CheckpointError(f"tensor {name}", "is missing", fix=GET_AGAIN)
        tensor = tensors[parameter.name]
        if tuple(tensor.shape) != parameter.shape:
            raise CheckpointError(
                f"tensor {name}",
                f"has shape {list(tensor.shape)}",
                allowed=f"{list(parameter.shape)}",
                fix=GET_AGAIN,
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        floating = tensor.is_floating_point() and tensor.element_size() > 1
        if dtype != parameter.dtype and not (parameter.dtype is None and floating):
            raise CheckpointError(
                f"tensor {name}",
                f"is {dtype}",
                allowed=parameter.dtype or "a floating type",
                fix=GET_AGAIN,
            )


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Checks scales or other floats, of any shape.

    Raises:
        CheckpointError: one is infinite or not a number.
    """
    least, most = tensor.aminmax()
    if not bool(least.isfinite() & most.isfinite()):
        raise CheckpointError(f"tensor {name}", "holds numbers that are not finite", fix=GET_AGAIN)


def check_no_nan(name: str, codes: torch.Tensor) -> None:
    """Checks codes of one byte, of any shape: e4m3 has a NaN, of either sign, and no infinity.

    Raises:
        CheckpointError: one is a NaN.
    """
    if not codes.is_floating_point():
        return
    if bool(((codes.view(torch.uint8) & _E4M3_NAN) == _E4M3_NAN).any()):
        raise CheckpointError(f"tensor {name}", "holds NaNs", fix=GET_AGAIN)


def check_positive(name: str, tensor: torch.Tensor) -> None:
    """Checks scales of inputs or of KV, of any shape.

    Raises:
        CheckpointError: one is zero, negative, infinite or not a number.
    """
    check_finite(name, tensor)
    if not bool((tensor.float() > 0).all()):
        raise CheckpointError(
            f"tensor {name}", "holds numbers that are not positive", fix=GET_AGAIN
        )


def check_range(name: str, tensor: torch.Tensor, low: int, high: int) -> None:
    """Checks whole numbers, such as groups or codes, of any shape.

    Raises:
        CheckpointError: one is out of [low, high].
    """
    least, most = int(tensor.min()), int(tensor.max())
    if least < low or most > high:
        raise CheckpointError(
            f"tensor {name}",
            f"holds numbers from {least} to {most}",
            allowed=f"{low} to {high}",
            fix=GET_AGAIN,
        )
