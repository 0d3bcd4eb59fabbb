"""AWQ checkpoints for Pegboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard import hookimpl

if TYPE_CHECKING:
    from pegboard.interfaces.quantizer import Quantizer, QuantizerContext
    from pegboard_quant.options import ActivationOptions


@hookimpl
def pegboard_quantizers() -> dict[str, Callable[[QuantizerContext, ActivationOptions], Quantizer]]:
    return {"awq": _make_quantizer}


def _make_quantizer(context: QuantizerContext, options: ActivationOptions) -> Quantizer:
    from pegboard_awq.quantizer import AWQQuantizer

    return AWQQuantizer(context, options)
