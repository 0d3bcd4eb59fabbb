"""Drafters without a model for Pegboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard import hookimpl

if TYPE_CHECKING:
    from pegboard.interfaces.drafter import Drafter, DrafterContext
    from pegboard_ngram.options import NgramOptions, SuffixOptions


@hookimpl
def pegboard_drafters() -> dict[str, Callable[..., Drafter]]:
    return {"ngram": _make_ngram, "suffix": _make_suffix}


def _make_ngram(context: DrafterContext, options: NgramOptions) -> Drafter:
    from pegboard_ngram.ngram import Ngram

    return Ngram(context, options)


def _make_suffix(context: DrafterContext, options: SuffixOptions) -> Drafter:
    from pegboard_ngram.suffix import Suffix

    return Suffix(context, options)
