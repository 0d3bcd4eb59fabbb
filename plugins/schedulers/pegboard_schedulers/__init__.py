"""Scheduling policies for Pegboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard import hookimpl

if TYPE_CHECKING:
    from pegboard.interfaces.scheduler import Scheduler, SchedulerContext
    from pegboard_schedulers.options import (
        FairOptions,
        PrefixAwareOptions,
        PriorityOptions,
        ShortestOptions,
    )


@hookimpl
def pegboard_schedulers() -> dict[str, Callable[..., Scheduler]]:
    return {
        "priority": _make_priority,
        "prefix_aware": _make_prefix_aware,
        "fair": _make_fair,
        "reserve": _make_reserve,
        "shortest": _make_shortest,
    }


def _make_priority(context: SchedulerContext, options: PriorityOptions) -> Scheduler:
    from pegboard_schedulers.priority import Priority

    return Priority(context, options)


def _make_prefix_aware(context: SchedulerContext, options: PrefixAwareOptions) -> Scheduler:
    from pegboard_schedulers.prefix_aware import PrefixAware

    return PrefixAware(context, options)


def _make_fair(context: SchedulerContext, options: FairOptions) -> Scheduler:
    from pegboard_schedulers.fair import Fair

    return Fair(context, options)


def _make_reserve(context: SchedulerContext) -> Scheduler:
    from pegboard_schedulers.reserve import Reserve

    return Reserve(context)


def _make_shortest(context: SchedulerContext, options: ShortestOptions) -> Scheduler:
    from pegboard_schedulers.shortest import Shortest

    return Shortest(context, options)
