"""The classical design of an inference server, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard import hookimpl

if TYPE_CHECKING:
    from pegboard.interfaces.kv_allocator import AllocatorContext, KVAllocator
    from pegboard.interfaces.scheduler import Scheduler, SchedulerContext


@hookimpl
def pegboard_kv_allocators() -> dict[str, Callable[[AllocatorContext], KVAllocator]]:
    return {"contiguous": _make_contiguous}


@hookimpl
def pegboard_schedulers() -> dict[str, Callable[[SchedulerContext], Scheduler]]:
    return {"static": _make_static}


def _make_contiguous(context: AllocatorContext) -> KVAllocator:
    from pegboard_baselines.contiguous import ContiguousAllocator

    return ContiguousAllocator(context)


def _make_static(context: SchedulerContext) -> Scheduler:
    from pegboard_baselines.static import StaticBatch

    return StaticBatch(context)
