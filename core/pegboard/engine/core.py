"""The engine's loop, host side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pegboard.engine.batch import build_batch
from pegboard.engine.commit import Committer, Tally
from pegboard.engine.intake import Intake
from pegboard.engine.observers import Observers
from pegboard.engine.parts import EngineParts
from pegboard.engine.prefixes import Prefixes
from pegboard.engine.queue import Queue
from pegboard.engine.step_builder import Plan, PlannedStep
from pegboard.errors import EngineError, RequestError
from pegboard.interfaces.kv_allocator import KVLedger, SharedPages
from pegboard.interfaces.observer import (
    ErrorHappened,
    LoadChanged,
    Observer,
    RequestArrived,
    StepDone,
)
from pegboard.request import Request, SequenceDelta
from pegboard.step import StepBatch, StepResult

MAX_IDLE_STEPS = 16
"""Steps in which nothing could be planned, before a request is failed for it."""


class EngineCore:
    """Requests in, deltas out, one step at a time. Not thread-safe: one loop calls it.

    Between steps it can be asked anything. What it calls (an observer, a scheduler) may look, and not
    call `add`, `abort`, `step` or `close`: that is an EngineError. A step that fails or is interrupted
    once it is planned breaks the engine: the deltas that end all requests are still handed out, and
    no request is taken.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._queue = Queue(parts.max_num_seqs)
        self._observers = Observers(parts.observers)
        self._prefixes = Prefixes(
            parts.prefix_cache,
            parts.allocator
            if parts.caches_prefixes and isinstance(parts.allocator, SharedPages)
            else None,
            parts.groups,
            self._note_cache_mistake,
        )
        self._intake = Intake(parts, self._prefixes)
        self._committer = Committer(parts, self._queue, self._prefixes, self._observers)
        self._step_id = 0
        self._num_idle_steps = 0
        self._broken: str | None = None
        self._call: str | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the workers. Raises what a worker's start raised."""
        self._parts.executor.start()

    def add(self, request: Request) -> None:
        """Takes a request; its sequences wait.

        Raises:
            RequestError: it cannot be honoured; nothing has changed.
            EngineError: the engine is broken.
        """
        with self._alone("add"):
            if self._broken is not None:
                raise EngineError(self._broken)
            request.check()
            if request.request_id in self._queue:
                raise RequestError(
                    "request_id", f"{request.request_id!r} is open", fix="use an id of its own"
                )
            opened = self._intake.open(request)
            self._queue.add(opened)
            num_prompt, num_seqs = len(request.prompt_token_ids), len(opened.sequences)
            self._observers.tell(
                RequestArrived(
                    request.request_id,
                    opened.arrival,
                    num_prompt,
                    num_seqs,
                    max_tokens=opened.max_known - num_prompt,
                )
            )

    def abort(self, request_id: str) -> None:
        """Ends a request, whatever its state; `step` hands out the last deltas. An unknown id is
        ignored: the request may have ended by itself."""
        with self._alone("abort"):
            opened = self._queue.request(request_id)
            if opened is not None:
                self._committer.end(opened, "abort", time.monotonic())

    def step(self) -> list[SequenceDelta]:
        """Plans, computes and commits one step.

        Raises:
            EngineError: the executor or the commit failed, and all requests with it; or the
                scheduler raised, and nothing has changed.
        """
        with self._alone("step"):
            if self._broken is None:
                started = time.monotonic()
                planned = self._plan()
                with self._whole():
                    self._run(planned.apply(started), started)
            return self._committer.take_deltas()

    def has_work(self) -> bool:
        """Whether a request is open, or `step` has deltas to hand out."""
        return bool(self.num_running or self.num_waiting or self._committer.has_deltas)

    def ledger(self) -> tuple[KVLedger, ...]:
        """Where KV pages are, a group."""
        return self._parts.allocator.ledger()

    @property
    def num_running(self) -> int:
        """Sequences that own a row."""
        return self._queue.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that do not."""
        return self._queue.num_waiting

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Those that still listen."""
        return self._observers.listening

    def close(self) -> None:
        """Ends what is open, and the workers, and tells observers. Idempotent."""
        with self._alone("close"):
            if self._closed:
                return
            self._closed = True
            self._broken = self._broken or "the engine is closed"
            self._committer.abandon("abort", time.monotonic())
            try:
                self._parts.executor.close()
            finally:
                self._observers.close()

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """One call at a time: what a call has changed half way is nobody else's to go on from."""
        if self._call is not None:
            raise EngineError(
                f"{call} was called while {self._call} runs; allowed: one call after the other"
            )
        self._call = call
        try:
            yield
        finally:
            self._call = None

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A planned step is run to its end, or the engine is broken: all open requests end."""
        try:
            yield
        except EngineError as error:
            self._break(str(error), error.__cause__ or error)
            raise
        except Exception as error:
            line = f"the step failed: {_described(error)}"
            self._break(line, error)
            raise EngineError(line) from error
        except BaseException as error:
            self._break(f"the step was interrupted: {_described(error)}", error)
            raise

    def _break(self, line: str, error: BaseException) -> None:
        """All open requests end with what happened."""
        self._broken = line
        self._observers.tell(ErrorHappened(type(error).__name__, line))
        self._committer.abandon("error", time.monotonic(), line)

    def _plan(self) -> PlannedStep:
        planned = PlannedStep(self._parts, self._queue, self._prefixes, self._note_policy_mistake)
        try:
            with self._parts.allocator.transaction():
                self._parts.scheduler.plan(self._queue, planned)
        except Exception as error:
            self._observers.tell(ErrorHappened(type(error).__name__, str(error)))
            raise EngineError(f"planning a step failed: {_described(error)}") from error
        finally:
            planned.close()
        return planned

    def _run(self, plan: Plan, started: float) -> None:
        if plan.entries:
            batch = build_batch(
                plan,
                self._step_id,
                self._queue.take_released(),
                self._parts.groups,
                self._parts.taps,
            )
            result = self._execute(batch)
            tally = self._commit(plan, result)
            self._report(plan, result, tally, started)
        self._watch_liveness(plan)
        if not plan.entries and self._committer.has_deltas:
            now, num_running, num_waiting = time.monotonic(), self.num_running, self.num_waiting
            self._observers.tell(LoadChanged(now, num_running, num_waiting, self.ledger()))

    def _execute(self, batch: StepBatch) -> StepResult:
        self._step_id += 1
        try:
            result = self._parts.executor.execute(batch).result()
            if result.step_id != batch.step_id:
                raise EngineError(
                    f"step {batch.step_id} was answered by a result of step {result.step_id}"
                )
            return result
        except Exception as error:
            raise EngineError(f"the executor failed: {_described(error)}") from error

    def _commit(self, plan: Plan, result: StepResult) -> Tally:
        tally = self._committer.commit(plan, result, time.monotonic())
        self._parts.allocator.fence(result.step_id)
        return tally

    def _report(self, plan: Plan, result: StepResult, tally: Tally, started: float) -> None:
        if not self._observers:
            return
        now = time.monotonic()
        num_prefill = num_decode = 0
        for entry in plan.entries:
            if entry.num_tokens == 1 and entry.start >= entry.seq.num_prompt:
                num_decode += 1 + entry.verify
            else:
                num_prefill += entry.num_tokens + entry.verify
        admitted = [entry.seq for entry in plan.admitted if not entry.seq.num_preemptions]
        self._observers.tell(
            StepDone(
                step_id=result.step_id,
                time=now,
                duration_s=now - started,
                forward_s=result.forward_s,
                sampling_s=result.sampling_s,
                drafting_s=result.drafting_s,
                num_prefill_tokens=num_prefill,
                num_decode_tokens=num_decode,
                num_output_tokens=tally.num_output_tokens,
                num_running=self.num_running,
                num_waiting=self.num_waiting,
                num_preempted=plan.num_preempted,
                num_drafts_tried=tally.num_drafts_tried,
                num_drafts_accepted=tally.num_drafts_accepted,
                kv=self.ledger(),
                first_token_s=tuple(tally.first_token_s),
                inter_token_s=tuple(tally.inter_token_s),
                num_sequences=len(plan.entries),
                num_prompt_tokens=tally.num_prompt_tokens,
                num_cached_prompt_tokens=tally.num_cached_prompt_tokens,
                num_prefix_queries=sum(seq.num_prompt for seq in admitted),
                num_prefix_hits=sum(seq.num_cached_tokens for seq in admitted),
                accepted_per_draft=tuple(tally.accepted_per_draft),
            )
        )

    def _watch_liveness(self, plan: Plan) -> None:
        """Fails the first request when nothing can be planned for too long."""
        stuck = self._queue.running or self._queue.waiting
        if plan.entries or not stuck:
            self._num_idle_steps = 0
            return
        self._num_idle_steps += 1
        if self._num_idle_steps < MAX_IDLE_STEPS:
            return
        self._num_idle_steps = 0
        opened = stuck[0].owner
        error = f"nothing could be planned for {MAX_IDLE_STEPS} steps; KV: {self._ledger_line()}"
        self._observers.tell(ErrorHappened("Stalled", error, opened.request.request_id))
        self._committer.end(opened, "error", time.monotonic(), error)

    def _ledger_line(self) -> str:
        return ", ".join(f"group {index}: {entry}" for index, entry in enumerate(self.ledger()))

    def _note_cache_mistake(self, message: str) -> None:
        self._observers.tell(ErrorHappened("PrefixCacheMistake", message))

    def _note_policy_mistake(self, message: str) -> None:
        self._observers.tell(ErrorHappened("SpeculationPolicyMistake", message))


def _described(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
