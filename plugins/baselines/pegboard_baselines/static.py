"""The static scheduler: one batch after the other."""

from __future__ import annotations

from pegboard.interfaces.scheduler import (
    MAX_PREFIX_SKIPS,
    QueueView,
    Scheduler,
    SchedulerContext,
    SequenceView,
    StepBuilder,
)


class StaticBatch(Scheduler):
    """When nothing runs, the sequences that have waited longest make a batch, as many as there are
    rows and KV for the worst case. Their prompts are computed first, all of them; then they decode
    together, and nobody joins before the last one has ended.

    KV for all that a sequence may generate is reserved at its admission, so none is preempted.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._members: set[int] = set()
        """Sequences of the batch, admitted or still to be admitted."""

    def resync(self, queue: QueueView) -> None:
        self._members = set()

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        if not queue.running:
            self._members = {seq.seq_id for seq in queue.waiting[: step.num_rows_left]}
        num_before = step.num_tokens_left
        self._prefill(queue, step)
        if step.num_tokens_left == num_before:
            for seq in queue.running:
                step.add(seq, seq.num_pending)
        if step.num_tokens_left == num_before:
            _make_room(queue, step)

    def _prefill(self, queue: QueueView, step: StepBuilder) -> None:
        """Goes on with prompts, and admits members while there is room."""
        for seq in queue.running:
            if _is_prompt_unfinished(seq):
                step.add(seq, seq.num_pending)
        num_skips = 0
        for seq in queue.waiting:
            if step.num_tokens_left < 1 or num_skips == MAX_PREFIX_SKIPS:
                return
            if seq.seq_id not in self._members:
                continue
            if step.waits_for_prefix(seq):
                num_skips += 1
                continue
            if not step.add(seq, seq.num_pending, _worst_case(seq, step)):
                # Who finds no room now makes way for the batch, with those behind.
                self._members = set()
                return


def _is_prompt_unfinished(seq: SequenceView) -> bool:
    return seq.num_pending > 1 or seq.num_computed < seq.num_prompt


def _worst_case(seq: SequenceView, step: StepBuilder) -> int:
    """Tokens of KV to reserve beside those of the first chunk."""
    num_tokens = min(seq.num_pending, step.num_tokens_left)
    return seq.num_pending - num_tokens + seq.max_tokens - seq.num_output


def _make_room(queue: QueueView, step: StepBuilder) -> None:
    """Preempts the newest until one can go on: those that another scheduler admitted may lack KV."""
    for victim in reversed(queue.running):
        if step.preempt(victim) and any(step.add(seq, seq.num_pending) for seq in queue.running):
            return
