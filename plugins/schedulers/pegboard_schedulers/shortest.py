"""`shortest`: the shortest predicted output first."""

from __future__ import annotations

from pegboard.interfaces.scheduler import (
    Caution,
    QueueView,
    Scheduler,
    SchedulerContext,
    SequenceView,
    StepBuilder,
)
from pegboard_schedulers.advancing import (
    admit,
    advance,
    decodes_first,
    max_output_left,
)
from pegboard_schedulers.options import ShortestOptions
from pegboard_schedulers.progress import Progress

NEWS_SHARE = 0.1
"""The weight of the latest output length in a tenant's mean."""

MAX_TENANTS = 1024
"""Tenants whose output lengths are remembered: those heard of last."""


class Shortest(Scheduler):
    """Admits the waiting sequence that is expected to end first; preempts the running one that is expected
    to end last.

    The prediction is `max_tokens`, or the mean of what the tenant's sequences took where that is less;
    among equals `max_tokens` decides. A sequence is overtaken by nobody who arrived more than `max_wait`
    after it: while such a one waits, it goes before all but its elders.
    """

    def __init__(self, context: SchedulerContext, options: ShortestOptions) -> None:
        self._max_wait = options.max_wait
        self._caution = Caution()
        self._progress = Progress()
        self._means: dict[str, float] = {}

    def resync(self, queue: QueueView) -> None:
        self._progress.begin(queue)

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        self._learn(queue)
        overdue = queue.waiting[-1].arrival - self._max_wait if queue.waiting else float("-inf")

        def place(seq: SequenceView) -> tuple[float, int, float, int]:
            """Sequences from before `overdue` in order of arrival, then the others by their output left."""
            if seq.arrival < overdue:
                return 0.0, 0, seq.arrival, seq.seq_id
            return self._predicted(seq), max_output_left(seq), seq.arrival, seq.seq_id

        running = queue.running
        preempted = advance(decodes_first(running), sorted(running, key=place), step)
        self._caution.note(bool(preempted))
        if preempted or step.num_rows_left < 1:
            return
        for seq in admit(iter(sorted(queue.waiting, key=place)), step, self._caution.output_room):
            if seq not in self._progress:
                self._progress.follow(seq)

    def _predicted(self, seq: SequenceView) -> float:
        """Output tokens still to come; at least 1, however long it has taken."""
        most = max_output_left(seq)
        mean = self._means.get(seq.tenant)
        return most if mean is None else max(1.0, min(most, mean - seq.num_output))

    def _learn(self, queue: QueueView) -> None:
        for served in self._progress.look(queue):
            if served.has_left:
                mean = self._means.pop(served.tenant, float(served.num_output))
                # Put in last: those not heard of for longest are forgotten first.
                self._means[served.tenant] = mean + NEWS_SHARE * (served.num_output - mean)
        while len(self._means) > MAX_TENANTS:
            del self._means[next(iter(self._means))]
