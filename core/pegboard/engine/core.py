"""The engine's loop, host side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pegboard.engine.batch import build_batch
from pegboard.engine.breaker import CutOff
from pegboard.engine.commit import Committer
from pegboard.engine.flight import Flight, Launched
from pegboard.engine.guarded_scheduler import GuardedScheduler
from pegboard.engine.intake import Intake
from pegboard.engine.observers import Observers
from pegboard.engine.parts import EngineParts
from pegboard.engine.prefix.prefixes import Prefixes
from pegboard.engine.queue import Queue
from pegboard.engine.reporting import Tally, ledger_line, step_done
from pegboard.engine.speculation import Speculation
from pegboard.engine.step_budget import StepBudget
from pegboard.engine.step_builder import PlannedStep
from pegboard.errors import INTERRUPTS, EngineError, RequestError, RequestFailed, described
from pegboard.interfaces.executor import WorkerHealth
from pegboard.interfaces.kv_allocator import KVLedger
from pegboard.interfaces.observer import ErrorHappened, LoadChanged, Observer, RequestArrived
from pegboard.request import Request, SequenceDelta
from pegboard.step import StepResult

MAX_IDLE_STEPS = 16
"""Steps in which nothing could be planned, before a request is failed for it."""


class EngineCore:
    """Requests in, deltas out, one step at a time. Not thread-safe: one loop calls it.

    Each call of `step` plans a step, launches it and commits the oldest in flight. With a depth of 1
    that is the same one; with 2 the workers compute a step while the one before is committed and the
    one after is planned. When nothing can be planned, what is in flight is committed all the same.

    Between steps all methods may be called. Plugins that it calls (an observer, a scheduler) may read, but
    not call `add`, `abort`, `step`, `reset_prefix_cache` or `close`: that is an EngineError. A step that
    fails or is interrupted once it is planned breaks the engine: the deltas that end all requests are
    still handed out, and no request is taken.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._queue = Queue(parts.max_num_seqs)
        self._flight = Flight(parts.executor, parts.depth)
        self._observers = Observers(parts.observers, parts.name_of)
        self._prefixes = Prefixes(parts, self._observers.tell)
        self._budget = StepBudget(parts.max_num_batched_tokens, parts.max_step_s)
        self._speculation = Speculation(parts)
        self._scheduler = GuardedScheduler(parts, self._queue, self._flight, self._new_step)
        self._breakers = (
            self._scheduler.breaker,
            parts.prefix_cache.breaker,
            self._speculation.policy,
            self._speculation.drafter,
            *self._observers.breakers,
        )
        self._intake = Intake(parts)
        self._committer = Committer(
            parts, self._queue, self._flight, self._prefixes, self._observers
        )
        self._is_settling = False
        self._num_resets = 0
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
            RequestFailed: something else went wrong with it alone; nothing has changed either.
            EngineError: the engine is broken.
        """
        with self._alone("add"):
            if self._broken is not None:
                raise EngineError(self._broken)
            try:
                self._take(request)
            except (RequestError, *INTERRUPTS):
                raise
            except BaseException as error:
                said = str(error) if isinstance(error, RequestFailed) else described(error)
                line = f"the request could not be taken: {said}"
                self._observers.tell(ErrorHappened("RequestFailed", line, request.request_id))
                raise RequestFailed(line) from error

    def abort(self, request_id: str) -> None:
        """Ends a request, whatever its state; `step` hands out the last deltas. An unknown id is
        ignored: the request may have ended by itself."""
        with self._alone("abort"):
            opened = self._queue.request(request_id)
            if opened is not None:
                self._committer.end(opened, "abort", time.monotonic())

    def step(self) -> list[SequenceDelta]:
        """Plans a step, launches it, and commits the oldest in flight once there are as many as may be,
        or when nothing could be planned.

        Raises:
            EngineError: the executor or the commit failed, and all requests with it.
        """
        with self._alone("step"):
            if self._broken is None:
                started = time.monotonic()
                planned = self._plan()
                with self._whole():
                    launched = self._launch(planned, started)
                    if self._flight.is_full or not launched:
                        self._commit()
                    self._prefixes.tell_news()
                self._tell_breakers()
            return self._committer.take_deltas()

    def reset_prefix_cache(self) -> None:
        """Forgets the prefix cache's names: no sequence begins with blocks computed before. Running
        sequences keep theirs. With the next step the drafter forgets what it keeps of other requests.

        Raises:
            EngineError: the engine is broken.
        """
        with self._alone("reset_prefix_cache"):
            if self._broken is not None:
                raise EngineError(self._broken)
            self._num_resets += 1
            self._prefixes.reset(self._queue.running)
            self._prefixes.tell_news()
            self._observers.tell(self._load())
            self._tell_breakers()

    def has_work(self) -> bool:
        """Whether a request is open, a step in flight, or `step` has deltas to hand out."""
        is_open = self.num_running or self.num_waiting or self._flight
        return bool(is_open or self._committer.has_deltas)

    def ledger(self) -> tuple[KVLedger, ...]:
        """The numbers of KV blocks by state, a group."""
        return self._parts.allocator.ledger()

    @property
    def num_running(self) -> int:
        """Sequences that own a row."""
        return self._queue.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that do not."""
        return self._queue.num_waiting

    def health(self) -> tuple[WorkerHealth, ...]:
        """How the workers' processes are; the one call that any thread may make at any time."""
        return self._parts.executor.health()

    @property
    def step_id(self) -> int:
        """Id of the step that is committed next."""
        return self._flight.fence + 1

    @property
    def observers(self) -> tuple[Observer, ...]:
        """The observers that are not cut off."""
        return self._observers.listening

    @property
    def cut_off(self) -> tuple[CutOff, ...]:
        """Plugins that the engine does without for now."""
        return tuple(entry for breaker in self._breakers if (entry := breaker.cut_off))

    def metrics(self) -> str:
        """The metrics of the observers that keep some, in Prometheus text format."""
        return self._observers.render()

    def close(self) -> None:
        """Ends open requests and the workers, and tells observers. Idempotent."""
        with self._alone("close"):
            if self._closed:
                return
            self._closed = True
            self._broken = self._broken or "the engine is closed"
            self._flight.clear()
            self._committer.abandon("abort", time.monotonic())
            try:
                self._parts.executor.close()
            finally:
                self._observers.close()

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """One call at a time: no other may see a state that is changed half way."""
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
            line = f"the step failed: {described(error)}"
            self._break(line, error)
            raise EngineError(line) from error
        except BaseException as error:
            self._break(f"the step was interrupted: {described(error)}", error)
            raise

    def _break(self, line: str, error: BaseException) -> None:
        """Breaks the engine: all open requests end with the reason."""
        self._broken = line
        self._flight.clear()
        self._observers.tell(ErrorHappened(type(error).__name__, line))
        self._committer.abandon("error", time.monotonic(), line)
        self._tell_breakers()

    def _take(self, request: Request) -> None:
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
                without_drafts=self._speculation.reason_without(opened),
            )
        )

    def _new_step(self) -> PlannedStep:
        return PlannedStep(
            self._parts, self._queue, self._prefixes, self._budget.num_tokens(self._queue)
        )

    def _plan(self) -> PlannedStep | None:
        """The next step; None while the one before waits for what is in flight."""
        if self._is_settling and self._flight:
            return None
        planned = self._scheduler.plan()
        self._is_settling = planned.waits_for_flight
        return planned

    def _launch(self, planned: PlannedStep | None, started: float) -> bool:
        """Puts a plan in force and gives it to the workers. Returns False for an empty plan."""
        if planned is None:
            return False
        self._speculation.add_drafts(planned)
        plan = planned.apply(started)
        if not plan.entries:
            return False
        batch = build_batch(
            plan,
            self._flight,
            self._queue.take_released(),
            self._parts.groups,
            self._speculation.drafter_trial,
            self._num_resets,
        )
        self._flight.launch(Launched(plan, batch, started))
        return True

    def _commit(self) -> None:
        """Puts the result of the oldest step in flight in force."""
        if self._flight:
            step, result = self._flight.land()
            tally = self._committer.commit(step.plan, result, time.monotonic())
            self._note(step, result, tally)
            self._prefixes.settle()
        elif self._committer.has_deltas:
            self._observers.tell(self._load())
        self._watch_liveness()

    def _note(self, step: Launched, result: StepResult, tally: Tally) -> None:
        """Tells all parts that a step has ended."""
        plan = step.plan
        self._parts.allocator.fence(result.step_id)
        self._queue.fence(result.step_id)
        self._scheduler.note(plan.num_preempted, tally.num_output_tokens)
        self._speculation.note(step, result)
        if plan.num_tokens > len(plan.entries):  # a prompt's, not only decodes
            self._budget.note(plan.num_tokens, step.ended - step.started)
        if self._observers:
            self._observers.tell(step_done(step, result, tally, self._load()))

    def _load(self) -> LoadChanged:
        return LoadChanged(time.monotonic(), self.num_running, self.num_waiting, self.ledger())

    def _watch_liveness(self) -> None:
        """Fails the first request when nothing can be planned for too long."""
        if self._scheduler.num_idle < MAX_IDLE_STEPS:
            return
        self._scheduler.num_idle = 0
        stuck = self._queue.running or self._queue.waiting
        opened = stuck[0].owner
        ledger = ledger_line(self.ledger())
        error = f"nothing could be planned for {MAX_IDLE_STEPS} steps; KV: {ledger}"
        self._observers.tell(ErrorHappened("Stalled", error, opened.request.request_id))
        self._committer.end(opened, "error", time.monotonic(), error)

    def _tell_breakers(self) -> None:
        for breaker in self._breakers:
            for event in breaker.take_news():
                self._observers.tell(event)
