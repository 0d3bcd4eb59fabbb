"""A small model that guesses ahead of a large one, for Pegboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard import hookimpl

if TYPE_CHECKING:
    from pegboard.interfaces.drafter import Drafter, DrafterContext
    from pegboard_draft_model.options import DraftModelOptions


@hookimpl
def pegboard_drafters() -> dict[str, Callable[[DrafterContext, DraftModelOptions], Drafter]]:
    return {"draft_model": _make_drafter}


def _make_drafter(context: DrafterContext, options: DraftModelOptions) -> Drafter:
    from pegboard_draft_model.drafter import DraftModel

    return DraftModel(context, options)
