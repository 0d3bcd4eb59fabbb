"""Schedulers for tests: the plainest one, and such as cut, interrupt and disorder plans."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pegboard.interfaces.scheduler import QueueView, Scheduler, SequenceView, StepBuilder

INTERRUPTION_RATE = 0.15
"""The share of steps before which a running sequence is preempted."""


class InOrder(Scheduler):
    """Running sequences first, in order; then those that wait, while they fit."""

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        planned = [seq for seq in queue.running if step.add(seq, seq.num_pending)]
        for seq in queue.waiting:
            if not step.add(seq, seq.num_pending):
                break
            planned.append(seq)
        if not planned:
            _make_room(queue.running, step, lambda seq: seq.num_pending)


class Chunked(Scheduler):
    """Another scheduler, whose plans get at most so many tokens of one sequence a step."""

    def __init__(self, inner: Scheduler, chunk: int) -> None:
        self._inner = inner
        self._chunk = chunk

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        self._inner.plan(queue, _CuttingStep(step, self._chunk))


class _CuttingStep(StepBuilder):
    """Cuts chunks. KV for the rest is still asked for, as a reserve."""

    def __init__(self, step: StepBuilder, chunk: int) -> None:
        self._step = step
        self._chunk = chunk

    @property
    def num_tokens_left(self) -> int:
        return self._step.num_tokens_left

    @property
    def num_rows_left(self) -> int:
        return self._step.num_rows_left

    def add(self, seq: SequenceView, num_tokens: int, reserve: int = 0) -> bool:
        cut = max(0, min(num_tokens, seq.num_pending) - self._chunk)
        return self._step.add(seq, num_tokens - cut, reserve + cut)

    def num_cached(self, seq: SequenceView) -> int:
        return self._step.num_cached(seq)

    def waits_for_prefix(self, seq: SequenceView) -> bool:
        return self._step.waits_for_prefix(seq)

    def preempt(self, seq: SequenceView) -> bool:
        return self._step.preempt(seq)


class Interrupted(Scheduler):
    """Another scheduler, some of whose running sequences are preempted at random before it plans."""

    def __init__(self, inner: Scheduler, seed: int) -> None:
        self._inner = inner
        self._random = random.Random(seed)

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        running = list(queue.running)
        if running and self._random.random() < INTERRUPTION_RATE:
            victim = self._random.choice(running)
            if step.preempt(victim):
                running.remove(victim)
        self._inner.plan(_Left(running, queue.waiting), step)


@dataclass(frozen=True, slots=True)
class _Left(QueueView):
    """A queue without those who were preempted: nothing is to be asked of them in this plan."""

    running: Sequence[SequenceView]
    waiting: Sequence[SequenceView]


class Disorder(Scheduler):
    """A scheduler that no engine should have: random order, random chunks, random preemptions.

    Args:
        seed: of the disorder.
        chunk: most tokens of one sequence a step; None: as many as fit.
    """

    def __init__(self, seed: int, chunk: int | None = None) -> None:
        self._random = random.Random(seed)
        self._chunk = chunk or 64

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        running, waiting = list(queue.running), list(queue.waiting)
        if running and self._random.random() < INTERRUPTION_RATE:
            victim = self._random.choice(running)
            if step.preempt(victim):
                running.remove(victim)
        everyone = running + waiting
        self._random.shuffle(everyone)
        planned = [seq for seq in everyone if step.add(seq, self._size())]
        if not planned:
            _make_room(running, step, lambda seq: self._size())

    def _size(self) -> int:
        return self._random.randint(1, self._chunk)


def _make_room(
    running: Sequence[SequenceView], step: StepBuilder, size: Callable[[SequenceView], int]
) -> None:
    """Nothing fitted: preempts, youngest first, until something does."""
    for victim in reversed(running):
        if any(step.add(seq, size(seq)) for seq in running if seq is not victim):
            return
        step.preempt(victim)
    for seq in running:
        if step.add(seq, 1):
            return
