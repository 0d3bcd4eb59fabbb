"""A scheduler with chosen victims, and the pool at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pegboard.builtin.fcfs import FCFS
from pegboard.interfaces.scheduler import QueueView, Scheduler, SchedulerContext, StepBuilder


class Preempting(FCFS):
    """Plans as FCFS does, but for the plans in which a test chooses a victim: nobody is admitted then."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self.victims: Iterator[int] = iter(())
        """Places among those that run, one a plan; negative: nobody."""

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        place = next(self.victims, -1)
        if place < 0:
            super().plan(queue, step)
            return
        assert step.preempt(queue.running[place])
        for seq in queue.running:
            step.add(seq, seq.num_pending)


@pytest.fixture
def preempting() -> Callable[[list[int]], Callable[[SchedulerContext], Scheduler]]:
    """(victims) -> makes a scheduler with these victims."""

    def with_victims(victims: list[int]) -> Callable[[SchedulerContext], Scheduler]:
        def make(context: SchedulerContext) -> Scheduler:
            scheduler = Preempting(context)
            scheduler.victims = iter(victims)
            return scheduler

        return make

    return with_victims


@pytest.fixture
def all_free() -> Callable[[Any], bool]:
    """(engine) -> whether every block is free once the cache has given up its names."""

    def all_free(engine: Any) -> bool:
        engine.core.reset_prefix_cache()
        return all(ledger.free == ledger.total for ledger in engine.core.ledger())

    return all_free
