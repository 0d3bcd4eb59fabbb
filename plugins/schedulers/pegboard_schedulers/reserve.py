"""`reserve`: nothing is preempted, because the worst case is reserved at admission."""

from __future__ import annotations

from pegboard.interfaces.scheduler import (
    QueueView,
    Scheduler,
    SchedulerContext,
    StepBuilder,
)
from pegboard_schedulers.advancing import admit, decodes_first, max_output_left


class Reserve(Scheduler):
    """In order of arrival; a sequence is admitted when KV for its prompt and all of `max_tokens` is
    its own. From then on it runs to its end: it lacks no KV, and is no one's victim.

    Nobody is overtaken, but by those who arrived while its prefix was being computed.
    """

    def __init__(self, context: SchedulerContext) -> None:
        pass

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        for seq in decodes_first(queue.running):
            if step.num_tokens_left < 1:
                return
            if not step.add(seq, seq.num_pending):
                # Another scheduler has admitted it, meanwhile, without all its KV: it starts anew.
                step.preempt(seq)
        for _ in admit(iter(queue.waiting), step, max_output_left):
            pass
