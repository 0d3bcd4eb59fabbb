"""GGUF checkpoints for Pegboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard import hookimpl

if TYPE_CHECKING:
    from pegboard.interfaces.checkpoint import CheckpointFacts, CheckpointSource
    from pegboard.interfaces.quantizer import Quantizer, QuantizerContext
    from pegboard_gguf.options import GGUFOptions


@hookimpl
def pegboard_checkpoint_sources() -> dict[str, Callable[[CheckpointFacts], CheckpointSource]]:
    return {"gguf": _open_source}


@hookimpl
def pegboard_quantizers() -> dict[str, Callable[[QuantizerContext, GGUFOptions], Quantizer]]:
    return {"gguf": _make_quantizer}


def _open_source(facts: CheckpointFacts) -> CheckpointSource:
    from pegboard_gguf.source import GGUFSource

    return GGUFSource(facts)


def _make_quantizer(context: QuantizerContext, options: GGUFOptions) -> Quantizer:
    from pegboard_gguf.quantizer import GGUFQuantizer

    return GGUFQuantizer(context, options)
