"""Code that Pegboard's quantizers share, quantizers that round while they load, and one of many layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pegboard import hookimpl

if TYPE_CHECKING:
    from pegboard.interfaces.quantizer import Quantizer, QuantizerContext
    from pegboard_quant.options import CheckpointOptions, RoundingOptions


@hookimpl
def pegboard_quantizers() -> dict[str, Callable[[QuantizerContext, Any], Quantizer]]:
    return {"int8": _make_int8, "mixed": _make_mixed, "w4": _make_w4}


@hookimpl
def pegboard_commands() -> dict[str, Callable[[], Any]]:
    return {"quantize": _quantize_command}


def _quantize_command() -> Any:
    from pegboard_quant.command import application

    return application()


def _make_int8(context: QuantizerContext, options: RoundingOptions) -> Quantizer:
    from pegboard_quant.online import INT8, OnlineQuantizer

    return OnlineQuantizer(context, options, INT8)


def _make_mixed(context: QuantizerContext, options: CheckpointOptions) -> Quantizer:
    from pegboard_quant.mixed import MixedQuantizer

    return MixedQuantizer(context, options)


def _make_w4(context: QuantizerContext, options: RoundingOptions) -> Quantizer:
    from pegboard_quant.online import W4, OnlineQuantizer

    return OnlineQuantizer(context, options, W4)
