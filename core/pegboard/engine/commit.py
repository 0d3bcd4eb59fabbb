"""Puts a step's result in force: sequences go on or end."""

from __future__ import annotations

import logging

from pegboard.engine.flight import Flight
from pegboard.engine.logprobs import logprobs_of
from pegboard.engine.observers import Observers
from pegboard.engine.parts import EngineParts
from pegboard.engine.prefix.prefixes import Prefixes
from pegboard.engine.queue import Queue
from pegboard.engine.reporting import Tally
from pegboard.engine.sequence import OpenRequest, Sequence
from pegboard.engine.step_builder import Plan
from pegboard.errors import INTERRUPTS, described
from pegboard.interfaces.observer import ErrorHappened, SequenceFinished
from pegboard.request import FinishReason, SequenceDelta, TokenLogprob
from pegboard.step import Logprobs, StepResult

_logger = logging.getLogger(__name__)


class Committer:
    """Writes results into sequences and collects the deltas."""

    def __init__(
        self,
        parts: EngineParts,
        queue: Queue,
        flight: Flight,
        prefixes: Prefixes,
        observers: Observers,
    ) -> None:
        self._allocator = parts.allocator
        self._flight = flight
        self._queue = queue
        self._prefixes = prefixes
        self._observers = observers
        self._speculates = parts.num_speculative_tokens > 0
        self._drafts_in_kv = parts.draft_slots is not None
        windows = [group for group in parts.groups if group.window is not None]
        self._window = max((group.window or 0 for group in windows), default=0)
        self._trim_stride = min((group.block_size for group in windows), default=1)
        self._deltas: list[SequenceDelta] = []

    @property
    def has_deltas(self) -> bool:
        return bool(self._deltas)

    def take_deltas(self) -> list[SequenceDelta]:
        """The deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def commit(self, plan: Plan, result: StepResult, now: float) -> Tally:
        """Puts the step's result in force, in the order of the batch's rows. Tokens of a sequence that has
        ended meanwhile are void."""
        tally = Tally()
        offsets, token_ids = result.offsets.tolist(), result.token_ids.tolist()
        accepted = result.num_accepted.tolist()
        if self._speculates:
            _keep_drafts(plan, result)
        self._fail(plan, result.failed, now)
        if result.prompt_logprobs is not None:
            self._collect(plan, result.prompt_logprobs, now)
        for index, entry in enumerate(plan.entries):
            seq = entry.seq
            if seq.row is None:
                continue
            num_accepted = accepted[index]
            seq.num_computed = entry.start + entry.num_tokens + num_accepted
            if num_accepted:
                seq.num_scheduled += num_accepted
                # The accepted drafts are in their slots; from now on these are tokens' slots.
                self._allocator.grow(seq.seq_id, seq.num_computed)
            committed = token_ids[offsets[index] : offsets[index + 1]]
            if committed and not self._extend(seq, committed, index, result, tally, now):
                continue
            if seq.num_computed >= seq.num_published + self._prefixes.stride:
                self._prefixes.publish(seq)
            if seq.ended is not None:
                self._retire(seq, now)
            elif (
                self._window
                or entry.verify > num_accepted
                or (entry.propose and self._drafts_in_kv)
            ):
                self._trim(seq, left_over=entry.verify > num_accepted or self._drafts_in_kv)
        return tally

    def end(
        self, request: OpenRequest, reason: FinishReason, now: float, error: str | None = None
    ) -> None:
        """Ends all sequences of a request that are still open."""
        for seq in tuple(request.sequences):
            seq.ended = reason
            self._deltas.append(_delta(seq, error=error))
            self._retire(seq, now)

    def abandon(self, reason: FinishReason, now: float, error: str | None = None) -> None:
        """Ends all requests of a broken engine, also in the midst of a commit."""
        told = {(last.request_id, last.index) for last in self._deltas if last.finish_reason}
        left = [seq for request in self._queue for seq in request.sequences]
        ended = [seq for seq in left if (seq.owner.request.request_id, seq.index) not in told]
        for seq in ended:
            seq.ended = reason
            self._deltas.append(_delta(seq, error=error))
        # From here on no request is open, also if this is interrupted.
        self._queue.clear()
        for seq in ended:
            self._observers.tell(_finished(seq, now))
        for seq in left:
            try:
                self._allocator.release(seq.seq_id)
            except Exception:
                _logger.exception("releasing the KV of sequence %d raised", seq.seq_id)

    def _extend(
        self,
        seq: Sequence,
        committed: list[int],
        index: int,
        result: StepResult,
        tally: Tally,
        now: float,
    ) -> bool:
        """Takes new tokens. Returns whether the request goes on; one of them may end it."""
        num_known = seq.num_known
        try:
            count, text = seq.take(committed)
            num_top = seq.owner.request.params.logprobs
            logprobs = (
                None if num_top is None else logprobs_of(result.logprobs, index, count, num_top)
            )
            self._deltas.append(_delta(seq, tuple(committed[:count]), text, logprobs))
        except INTERRUPTS:
            raise
        except BaseException as error:
            seq.num_known = num_known
            self._fail_alone(seq.owner, error, now)
            return False
        tally.num_output_tokens += count
        if seq.last_token_at is None:
            seq.first_token_at = now
            tally.first_token_s.append(now - seq.arrival)
            if seq.index == 0:
                tally.num_prompt_tokens += seq.num_prompt
                tally.num_cached_prompt_tokens += seq.num_cached_tokens
        else:
            tally.inter_token_s.append(now - seq.last_token_at)
        seq.last_token_at = now
        return True

    def _trim(self, seq: Sequence, left_over: bool) -> None:
        """Gives back the blocks of drafts and of tokens before the window.

        left_over: whether there are slots of rejected drafts, or of a drafter's own.
        """
        left = seq.num_computed - self._window + 1 if self._window else 0
        if left_over or left >= seq.num_trimmed + self._trim_stride:
            seq.num_trimmed = max(left, 0)
            keep_to = max(seq.num_scheduled, seq.num_reserved)
            self._allocator.trim(seq.seq_id, seq.num_trimmed, keep_to)

    def _fail(self, plan: Plan, failed: dict[int, str], now: float) -> None:
        """Ends the whole request of each row that failed."""
        for entry in plan.entries if failed else ():
            row = entry.seq.row
            if row is not None and row in failed:
                request_id = entry.seq.owner.request.request_id
                self._observers.tell(ErrorHappened("RowFailed", failed[row], request_id))
                self.end(entry.seq.owner, "error", now, failed[row])

    def _collect(self, plan: Plan, logprobs: Logprobs, now: float) -> None:
        """Collects the step's logprobs of prompts."""
        for index, entry in enumerate(plan.entries):
            request = entry.seq.owner
            if request.prompt_logprobs is not None and entry.seq.ended is None:
                try:
                    request.prompt_logprobs.add(logprobs, index, entry.start)
                except INTERRUPTS:
                    raise
                except BaseException as error:
                    self._fail_alone(request, error, now)

    def _fail_alone(self, request: OpenRequest, error: BaseException, now: float) -> None:
        """Ends a request whose tokens could not be made into text or values; others go on."""
        _logger.error("request %r failed", request.request.request_id, exc_info=error)
        request.prompt_logprobs = None
        line = f"the answer could not be put together: {described(error)}"
        self._observers.tell(ErrorHappened("RequestFailed", line, request.request.request_id))
        self.end(request, "error", now, line)

    def _retire(self, seq: Sequence, now: float) -> None:
        after_step = self._flight.newest if seq.is_in_flight else None
        self._allocator.release(seq.seq_id, after_step)
        self._queue.remove(seq, after_step)
        if self._observers:
            self._observers.tell(_finished(seq, now))


def _keep_drafts(plan: Plan, result: StepResult) -> None:
    """Notes the drafts that each row holds for the next step, and how many were accepted."""
    num_drafts, confidences = result.num_drafts.tolist(), result.confidences.tolist()
    tried, accepted = result.num_tried.tolist(), result.num_accepted.tolist()
    parents = None if result.parents is None else result.parents.tolist()
    start = 0
    for index, entry in enumerate(plan.entries):
        seq, end = entry.seq, start + num_drafts[index]
        seq.num_drafts, seq.confidences = num_drafts[index], confidences[start:end]
        # Without parents all drafts are chains.
        seq.parents = range(-1, num_drafts[index] - 1) if parents is None else parents[start:end]
        if entry.verify or entry.propose:
            seq.has_drafts_in_flight = False
        seq.num_tried += tried[index]
        seq.num_accepted += accepted[index]
        start = end


def _finished(seq: Sequence, now: float) -> SequenceFinished:
    assert seq.ended is not None
    return SequenceFinished(
        request_id=seq.owner.request.request_id,
        index=seq.index,
        reason=seq.ended,
        arrival=seq.arrival,
        admitted=seq.admitted_at,
        first_token=seq.first_token_at,
        finished=now,
        num_prompt_tokens=seq.num_prompt,
        num_cached_tokens=seq.num_cached_tokens,
        num_output_tokens=seq.num_output,
        num_preemptions=seq.num_preemptions,
    )


def _delta(
    seq: Sequence,
    token_ids: tuple[int, ...] = (),
    text: str = "",
    logprobs: tuple[TokenLogprob, ...] | None = None,
    error: str | None = None,
) -> SequenceDelta:
    """A sequence's delta. The prompt's logprobs come once, with the request's first tokens."""
    prompt_logprobs, collected = None, seq.owner.prompt_logprobs
    if collected is not None and token_ids and collected.is_complete:
        prompt_logprobs, seq.owner.prompt_logprobs = collected.values(), None
    return SequenceDelta(
        request_id=seq.owner.request.request_id,
        index=seq.index,
        token_ids=token_ids,
        text=text,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=seq.ended,
        stop_reason=seq.stop_reason,
        error=error,
        num_prompt_tokens=seq.num_prompt,
        num_cached_tokens=seq.num_cached_tokens,
        num_output_tokens=seq.num_output,
    )
