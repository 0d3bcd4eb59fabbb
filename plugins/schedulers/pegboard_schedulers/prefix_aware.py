"""`prefix_aware`: the longest cached prefix first."""

from __future__ import annotations

from collections.abc import Iterator

from pegboard.interfaces.scheduler import (
    Caution,
    QueueView,
    Scheduler,
    SchedulerContext,
    SequenceView,
    StepBuilder,
)
from pegboard_schedulers.advancing import admit, advance, decodes_first
from pegboard_schedulers.options import PrefixAwareOptions


class PrefixAware(Scheduler):
    """Of the oldest waiting sequences, admits those first of which the cache holds most tokens: cached
    blocks are used before they are evicted, and sequences of one prefix run together.

    While it waits, a sequence is overtaken at most `max_overtakes` times; then it goes first. Plans in
    which it is passed over because its own prefix is being computed do not count.
    """

    def __init__(self, context: SchedulerContext, options: PrefixAwareOptions) -> None:
        self._window = options.window
        self._max_overtakes = options.max_overtakes
        self._caution = Caution()
        self._overtakes: dict[int, int] = {}

    def resync(self, queue: QueueView) -> None:
        self._overtakes.clear()

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        running = queue.running
        preempted = advance(decodes_first(running), list(running), step)
        self._caution.note(bool(preempted))
        if preempted:
            return
        left = {seq.seq_id: seq for seq in queue.waiting[: self._window]}
        for seq in admit(self._in_order(left, step), step, self._caution.output_room):
            self._count(seq, left)
        if self._overtakes:
            waiting = {seq.seq_id for seq in queue.waiting}
            self._overtakes = {k: v for k, v in self._overtakes.items() if k in waiting}

    def _in_order(self, left: dict[int, SequenceView], step: StepBuilder) -> Iterator[SequenceView]:
        """Takes one sequence after the other out of `left`, which stands in order of arrival."""
        by_prefix = iter(sorted(left.values(), key=lambda seq: -step.num_cached(seq)))
        while left:
            seq = self._overdue(left) or next(seq for seq in by_prefix if seq.seq_id in left)
            del left[seq.seq_id]
            yield seq

    def _overdue(self, left: dict[int, SequenceView]) -> SequenceView | None:
        """The oldest that may not be overtaken any more."""
        for seq_id, seq in left.items():
            if self._overtakes.get(seq_id, 0) >= self._max_overtakes:
                return seq
        return None

    def _count(self, admitted: SequenceView, left: dict[int, SequenceView]) -> None:
        """The older ones that are left have been overtaken."""
        self._overtakes.pop(admitted.seq_id, None)
        place = (admitted.arrival, admitted.seq_id)
        for seq_id, seq in left.items():
            if (seq.arrival, seq_id) > place:
                return
            self._overtakes[seq_id] = self._overtakes.get(seq_id, 0) + 1
