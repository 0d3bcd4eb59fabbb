"""A scheduler is a policy: it asks the step builder, which refuses what does not fit."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.interfaces.scheduler import (
    QueueView,
    Scheduler,
    SchedulerContext,
    SequenceView,
    StepBuilder,
)
from pegboard_shortest_first.options import Options


class ShortestFirst(Scheduler):
    """Running sequences go on; then those that waited too long; then the shortest prompts."""

    def __init__(self, context: SchedulerContext, options: Options) -> None:
        self._max_wait = options.max_wait

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        planned = [seq for seq in queue.running if step.add(seq, seq.num_pending)]
        for seq in self._in_order(queue.waiting):
            if not step.add(seq, seq.num_pending):
                break
            planned.append(seq)
        if not planned:
            _make_room(queue.running, step)

    def _in_order(self, waiting: Sequence[SequenceView]) -> list[SequenceView]:
        newest = max((seq.arrival for seq in waiting), default=0.0)

        def place(seq: SequenceView) -> tuple[bool, float]:
            overdue = newest - seq.arrival > self._max_wait
            return not overdue, seq.arrival if overdue else seq.num_pending

        return sorted(waiting, key=place)


def _make_room(running: Sequence[SequenceView], step: StepBuilder) -> None:
    """KV is full of sequences that cannot go on: the youngest give theirs back."""
    for victim in reversed(running):
        step.preempt(victim)
        if any(step.add(seq, seq.num_pending) for seq in running if seq is not victim):
            return
