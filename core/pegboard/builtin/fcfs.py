"""First come, first served, with chunked prefill."""

from __future__ import annotations

from pegboard.interfaces.scheduler import (
    MAX_PREFIX_SKIPS,
    Caution,
    QueueView,
    Scheduler,
    SchedulerContext,
    SequenceView,
    StepBuilder,
)


class FCFS(Scheduler):
    """Decodes run first, then unfinished prompts, then new requests in order of arrival.

    A step's token budget cuts prompts into chunks; a prompt is admitted once its whole KV fits.
    Requests whose beginning another one is computing are passed over meanwhile.
    When KV runs out, the newest running sequence is preempted. A preemption makes admission
    cautious for a while: newcomers then need room for their output too, so that they are not
    preempted again at once.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._caution = Caution()

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        preempted = self._advance(queue, step)
        if not preempted:
            self._admit(queue, step)
        self._caution.note(preempted)

    def _advance(self, queue: QueueView, step: StepBuilder) -> bool:
        """Lets running sequences go on; True when one had to be preempted for that."""
        running = queue.running
        candidates = list(running)
        preempted: set[int] = set()
        for seq in sorted(running, key=_is_prompt_unfinished):
            if seq.seq_id not in preempted and not step.add(seq, seq.num_pending):
                _make_room(seq, candidates, preempted, step)
        return bool(preempted)

    def _admit(self, queue: QueueView, step: StepBuilder) -> None:
        alone = not queue.running
        num_skips = 0
        for seq in queue.waiting:
            if step.num_tokens_left < 1 or step.num_rows_left < 1 or num_skips == MAX_PREFIX_SKIPS:
                return
            if step.waits_for_prefix(seq):
                num_skips += 1
                continue
            num_pending = seq.num_pending - step.num_cached(seq)
            num_tokens = min(num_pending, step.num_tokens_left)
            reserve = num_pending - num_tokens
            if not alone:
                reserve += self._caution.output_room(seq)
            if not step.add(seq, num_tokens, reserve):
                return
            alone = False


def _is_prompt_unfinished(seq: SequenceView) -> bool:
    return seq.num_pending > 1


def _make_room(
    seq: SequenceView, candidates: list[SequenceView], preempted: set[int], step: StepBuilder
) -> None:
    """Preempts the newest candidates until the sequence, which did not fit, can be added."""
    while step.num_tokens_left >= 1 and candidates:
        victim = candidates.pop()
        if step.preempt(victim):
            preempted.add(victim.seq_id)
            if victim is seq:
                return
        if step.add(seq, seq.num_pending):
            return
