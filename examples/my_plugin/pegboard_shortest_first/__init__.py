"""The shortest prompt first: hooks only, so that finding the plugin costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pegboard import hookimpl

if TYPE_CHECKING:
    from pegboard.interfaces.scheduler import Scheduler, SchedulerContext
    from pegboard_shortest_first.options import Options


def _make(context: SchedulerContext, options: Options) -> Scheduler:
    from pegboard_shortest_first.scheduler import ShortestFirst

    return ShortestFirst(context, options)


@hookimpl
def pegboard_schedulers() -> Mapping[str, Callable[..., Scheduler]]:
    return {"shortest_first": _make}
