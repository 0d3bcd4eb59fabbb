"""The executor whose workers live in processes of their own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any, TypeVar

import zmq

from pegboard.errors import ConfigError, EngineError, described
from pegboard.interfaces.executor import (
    Executor,
    ExecutorContext,
    WorkerHealth,
    WorkerProgram,
)
from pegboard.interfaces.worker_process import (
    Built,
    Call,
    Close,
    Execute,
    FromWorker,
    Loaded,
    Start,
    ToWorker,
)
from pegboard.step import StepBatch, StepResult, decode, encode
from pegboard_executors.link import Link
from pegboard_executors.options import ProcessesOptions
from pegboard_executors.worker_process import WorkerProcess

LOOK_S = 0.25
"""Time between two looks at the processes."""

CONNECT_S = 60.0
"""How long a process may take from its start until it is connected."""

CLOSE_S = 5.0
"""How long an idle worker may take to close."""

T = TypeVar("T")


class ProcessesExecutor(Executor):
    """Runs each worker through `pegboard.runner_main`; see `interfaces.worker_process`."""

    def __init__(self, context: ExecutorContext, options: ProcessesOptions) -> None:
        self._context = context
        self._options = options
        self._link: Link | None = None
        self._workers: tuple[WorkerProcess, ...] = ()
        self._thread: threading.Thread | None = None
        self._news: SimpleQueue[FromWorker | None] = SimpleQueue()
        self._closed = False

    def start(self) -> None:
        programs = [
            self._context.worker_program(rank) for rank in range(len(self._context.devices))
        ]
        self._link = self._listen()
        self._workers = tuple(
            WorkerProcess(rank, program.argv, self._link) for rank, program in enumerate(programs)
        )
        spawned: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._watch, args=(self._link, spawned), name="workers", daemon=True
        )
        self._thread.start()
        try:
            spawned.result()
        except (OSError, ValueError) as error:  # ValueError: a word that no argument can be
            raise ConfigError(
                "executor.options.launch", f"{error}", allowed="a command that can be run"
            ) from None
        self._load(programs)

    def execute(self, batch: StepBatch) -> Future[StepResult]:
        request = Execute(encode(batch))
        return self._ask(f"in step {batch.step_id}", request, _result)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self._ask(f"answering {method!r}", Call(method, list(arguments)), list).result()

    def health(self) -> tuple[WorkerHealth, ...]:
        return () if self._closed else tuple(worker.health() for worker in self._workers)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Who is busy would answer late or never; nothing of what it does is wanted any more.
        asked = [worker for worker in self._workers if worker.is_free]
        for worker in asked:
            worker.ask("closing", Close())
        deadline = time.monotonic() + CLOSE_S
        for worker in asked:
            worker.wait(max(deadline - time.monotonic(), 0.0))
        for worker in self._workers:
            worker.end("was closed")
            worker.wait(CLOSE_S)
        if self._thread is not None:
            self._thread.join()
        if self._link is not None:
            self._link.close()

    def _listen(self) -> Link:
        address = self._options.address
        try:
            return Link(len(self._context.devices), None if address == "auto" else address)
        except zmq.ZMQError as error:
            raise ConfigError(
                "executor.options.address",
                f"{address} cannot be listened on: {error.strerror}",
                allowed="auto, or an address of this machine",
            ) from None

    def _load(self, programs: list[WorkerProgram]) -> None:
        """Builds and loads all workers at once."""
        assert self._link is not None
        started = time.monotonic()
        for rank, worker in enumerate(self._workers):
            while not worker.ended and not self._link.is_connected(rank, LOOK_S):
                if time.monotonic() - started > CONNECT_S:
                    worker.end(f"did not connect within {CONNECT_S:.0f} s")
        answers = [
            worker.ask("starting", Start(program.composition, program.digest))
            for worker, program in zip(self._workers, programs, strict=True)
        ]
        loaded = _gathered(answers, list)
        loaded.add_done_callback(lambda _: self._news.put(None))
        while (message := self._news.get()) is not None:
            match message:
                case Built(rank=0):
                    self._context.on_built()
                case Loaded(rank=0, name=name):
                    self._context.on_tensor(name)
        loaded.result()

    def _ask(self, what: str, request: ToWorker, make: Callable[[list[Any]], T]) -> Future[T]:
        if not self._workers or self._closed:
            raise EngineError("the workers are not running; call start first")
        return _gathered([worker.ask(what, request) for worker in self._workers], make)

    def _watch(self, link: Link, spawned: Future[None]) -> None:
        """Starts the processes and listens to them until all have ended."""
        try:
            for worker in self._workers:
                worker.spawn(self._options.launch)
            spawned.set_result(None)
        except BaseException as error:  # `start` waits for it
            spawned.set_exception(error)
        try:
            self._listen_to_all(link)
        except Exception as error:  # nobody would notice anything any more
            for worker in self._workers:
                worker.end(f"could not be understood ({described(error)})")
            raise

    def _listen_to_all(self, link: Link) -> None:
        then = time.monotonic()
        while not self._closed or not all(worker.ended for worker in self._workers):
            for message in link.receive(LOOK_S):
                self._workers[message.rank].heed(message)
                if isinstance(message, Built | Loaded):
                    self._news.put(message)
            now = time.monotonic()
            for worker in self._workers:
                worker.look(min(now - then, 2 * LOOK_S))
            then = now


def _result(answers: list[Any]) -> StepResult:
    """The ranks' results are the same, but for their seconds."""
    return decode(answers[0], StepResult)


def _gathered(answers: list[Future[Any]], make: Callable[[list[Any]], T]) -> Future[T]:
    """The future of a function of all answers; of the first exception, where there is one."""
    made: Future[T] = Future()
    left = threading.Semaphore(len(answers) - 1)

    def settle(answer: Future[Any]) -> None:
        with contextlib.suppress(InvalidStateError):  # another has failed before
            if (error := answer.exception()) is not None:
                made.set_exception(error)
            elif not left.acquire(blocking=False):
                try:
                    made.set_result(make([one.result() for one in answers]))
                except Exception as problem:
                    made.set_exception(problem)

    for answer in answers:
        answer.add_done_callback(settle)
    return made
