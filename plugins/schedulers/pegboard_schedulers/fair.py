"""`fair`: the tenant that has been served least goes first (virtual token counters, arXiv 2401.00588)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from pegboard.interfaces.scheduler import (
    Caution,
    QueueView,
    Scheduler,
    SchedulerContext,
    SequenceView,
    StepBuilder,
)
from pegboard_schedulers.advancing import admit, advance, decodes_first
from pegboard_schedulers.options import FairOptions
from pegboard_schedulers.progress import Progress

MAX_ABSENT = 1024
"""Tenants without a sequence whose counters are kept, before those that say nothing are dropped."""

Lines = dict[str, deque[SequenceView]]


class Fair(Scheduler):
    """Each tenant has a counter of the tokens that it was served, prompt at admission and output as
    it comes, divided by its weight. The least counter's oldest sequence is admitted next.

    A tenant that comes to the line is lifted to the least counter in it, so that no claim is saved up
    while idle. The counters of two tenants that both wait differ by at most what one tenant's running
    sequences cost; so does their service over any time, by twice that. Who waits alone gets all.
    """

    def __init__(self, context: SchedulerContext, options: FairOptions) -> None:
        self._options = options
        self._caution = Caution()
        self._progress = Progress()
        self._counters: dict[str, float] = {}
        self._in_line: set[str] = set()
        self._level = 0.0
        """The counter of who was admitted last."""

    def resync(self, queue: QueueView) -> None:
        self._progress.begin(queue)
        self._counters.clear()
        self._in_line.clear()
        self._level = 0.0

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        for served in self._progress.look(queue):
            self._charge(served.tenant, served.num_new * self._options.output_weight)
        lines: Lines = {}
        for seq in queue.waiting:
            lines.setdefault(seq.tenant, deque()).append(seq)
        self._lift_newcomers(lines)
        running = sorted(queue.running, key=lambda seq: self._counter(seq.tenant))
        preempted = advance(decodes_first(running), list(running), step)
        self._caution.note(bool(preempted))
        admitted = set[int]() if preempted else self._admit(lines, step)
        self._in_line = {seq.tenant for seq in queue.waiting if seq.seq_id not in admitted}
        self._forget({seq.tenant for seq in running} | lines.keys())

    def _admit(self, lines: Lines, step: StepBuilder) -> set[int]:
        """Admits whom it can; returns their ids."""
        admitted: set[int] = set()
        for seq in admit(self._in_order(lines), step, self._caution.output_room):
            admitted.add(seq.seq_id)
            if seq not in self._progress:
                self._progress.follow(seq)
                self._charge(seq.tenant, seq.num_prompt * self._options.input_weight)
            self._level = self._counter(seq.tenant)
        return admitted

    def _in_order(self, lines: Lines) -> Iterator[SequenceView]:
        """The oldest sequence of the least counter, over and over; it may be charged in between."""
        heap = [(self._counter(tenant), place, tenant) for place, tenant in enumerate(lines)]
        heapify(heap)
        while heap:
            _, place, tenant = heappop(heap)
            yield lines[tenant].popleft()
            if lines[tenant]:
                heappush(heap, (self._counter(tenant), place, tenant))

    def _lift_newcomers(self, lines: Lines) -> None:
        """A tenant that comes to the line starts at its least counter, or above."""
        stayed = [self._counter(tenant) for tenant in lines if tenant in self._in_line]
        least = min(stayed, default=self._level)
        for tenant in lines:
            if tenant not in self._in_line:
                self._counters[tenant] = max(self._counters.get(tenant, least), least)

    def _counter(self, tenant: str) -> float:
        return self._counters.get(tenant, self._level)

    def _charge(self, tenant: str, cost: float) -> None:
        weight = self._options.weights.get(tenant, 1.0)
        self._counters[tenant] = self._counter(tenant) + cost / weight

    def _forget(self, present: set[str]) -> None:
        """Drops counters that would be lifted in any case."""
        if len(self._counters) > len(present) + MAX_ABSENT:
            least = min([self._level, *(self._counter(tenant) for tenant in present)])
            absent = self._counters.keys() - present
            for tenant in [tenant for tenant in absent if self._counters[tenant] <= least]:
                del self._counters[tenant]
