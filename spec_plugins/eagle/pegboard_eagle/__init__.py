"""EAGLE 1, 2 and 3 for Pegboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pegboard import hookimpl

if TYPE_CHECKING:
    from pegboard.interfaces.drafter import Drafter, DrafterContext
    from pegboard_eagle.options import EagleOptions


@hookimpl
def pegboard_drafters() -> dict[str, Callable[[DrafterContext, EagleOptions], Drafter]]:
    return {"eagle": _make_drafter}


@hookimpl
def pegboard_commands() -> dict[str, Callable[[], Any]]:
    return {"train-eagle": _train_command}


def _train_command() -> Any:
    from pegboard_eagle.training.command import application

    return application()


def _make_drafter(context: DrafterContext, options: EagleOptions) -> Drafter:
    from pegboard_eagle.drafter import EagleDrafter

    return EagleDrafter(context, options)
