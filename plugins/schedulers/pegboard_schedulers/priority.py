"""`priority`: higher classes first; they preempt lower ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from heapq import merge

from pegboard.interfaces.scheduler import (
    MAX_PREFIX_SKIPS,
    Caution,
    QueueView,
    Scheduler,
    SchedulerContext,
    SequenceView,
    StepBuilder,
)
from pegboard_schedulers.advancing import (
    add_newcomer,
    advance,
    is_prompt_unfinished,
    max_output_left,
)
from pegboard_schedulers.options import PriorityOptions

Place = tuple[float, float, int]


class Priority(Scheduler):
    """Classes by `priority`, the lower number first; within a class in order of arrival.

    Decodes come first where a step has room for all that run, then prompts and newcomers by their
    place. A newcomer that lacks a row or KV preempts running sequences of lower classes, the last by
    place first.

    Waiting raises the class: a place is that of an arrival `max_wait` seconds later for each class, so
    a sequence of class p is overtaken by one of a higher class q only if that one arrived less than
    (p - q) * max_wait after it. Places never change, so no two sequences preempt each other in turn.
    """

    def __init__(self, context: SchedulerContext, options: PriorityOptions) -> None:
        self._max_wait = options.max_wait
        self._caution = Caution()

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        turn = _Turn(self.place, self._caution, queue, step)
        turn.decode()
        turn.share_the_rest()
        self._caution.note(bool(turn.preempted))

    def place(self, seq: SequenceView) -> Place:
        """Whose place is less goes first."""
        if self._max_wait is None:
            return seq.priority, seq.arrival, seq.seq_id
        return seq.priority * self._max_wait + seq.arrival, seq.arrival, seq.seq_id


class _Turn:
    """One plan.

    Attributes:
        preempted: ids of those that were.
    """

    def __init__(
        self,
        place: Callable[[SequenceView], Place],
        caution: Caution,
        queue: QueueView,
        step: StepBuilder,
    ) -> None:
        self._place, self._caution, self._step = place, caution, step
        self._running = sorted(queue.running, key=place)
        self._waiting = sorted(queue.waiting, key=place)
        self._victims = list(self._running)
        self._left = self._running
        self.preempted: set[int] = set()

    def decode(self) -> None:
        """Decodes go on, where a token is left for others then; else place alone decides."""
        if len(self._running) < self._step.num_tokens_left:
            decodes = [seq for seq in self._running if not is_prompt_unfinished(seq)]
            self._left = [seq for seq in self._running if is_prompt_unfinished(seq)]
            self.preempted |= advance(decodes, self._victims, self._step)

    def share_the_rest(self) -> None:
        """Gives the tokens that are left to running and waiting sequences, by place."""
        owners = {seq.seq_id for seq in self._left}
        num_skips, admits = 0, True
        for seq in merge(self._left, self._waiting, key=self._place):
            if self._step.num_tokens_left < 1 or not (admits or owners):
                return
            if seq.seq_id in owners:
                owners.discard(seq.seq_id)
                if seq.seq_id not in self.preempted:
                    self.preempted |= advance([seq], self._victims, self._step)
            elif not admits:
                continue
            elif self._step.waits_for_prefix(seq):
                num_skips += 1
                admits = num_skips < MAX_PREFIX_SKIPS
            else:
                admits = self._admit(seq)

    def _admit(self, seq: SequenceView) -> bool:
        """Admits a newcomer, at the cost of lower classes; False: nobody after it either."""
        place, step = self._place(seq), self._step
        lost = [victim for victim in self._running if victim.seq_id in self.preempted]
        if lost and self._place(lost[0]) < place:
            return False
        room = max_output_left(seq) if self._is_raised(seq) else 0
        if add_newcomer(seq, step, max(room, self._caution.output_room(seq))):
            return True
        for victim in reversed(self._running):
            if self._place(victim) < place:
                return False
            if victim.priority > seq.priority and step.preempt(victim):
                self.preempted.add(victim.seq_id)
                if add_newcomer(seq, step, room):
                    return True
        return False

    def _is_raised(self, seq: SequenceView) -> bool:
        """Whether it goes before a higher class because it has waited. The engine lets the oldest of
        the highest class only grow, so this one needs all its KV for good, or might never end."""
        place = self._place(seq)
        return any(
            other.priority < seq.priority and self._place(other) > place for other in self._last
        )

    @cached_property
    def _last(self) -> list[SequenceView]:
        """The last by place of each class, of those that run and of those that wait."""
        running = {seq.priority: seq for seq in self._running}
        waiting = {seq.priority: seq for seq in self._waiting}
        return [*running.values(), *waiting.values()]
