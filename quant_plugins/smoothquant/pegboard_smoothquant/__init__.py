"""W8A8 checkpoints in int8 for Pegboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard import hookimpl

if TYPE_CHECKING:
    from pegboard.interfaces.quantizer import Quantizer, QuantizerContext
    from pegboard_quant.options import CheckpointOptions


@hookimpl
def pegboard_quantizers() -> dict[str, Callable[[QuantizerContext, CheckpointOptions], Quantizer]]:
    return {"smoothquant": _make_quantizer}


def _make_quantizer(context: QuantizerContext, options: CheckpointOptions) -> Quantizer:
    from pegboard_smoothquant.quantizer import SmoothQuantizer

    return SmoothQuantizer(context, options)
