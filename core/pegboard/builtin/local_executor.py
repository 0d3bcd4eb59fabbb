"""The executor for one device: its worker lives in the engine's process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from pegboard.errors import EngineError
from pegboard.interfaces.executor import Executor, ExecutorContext, Worker, WorkerHealth
from pegboard.step import StepBatch, StepResult

P = ParamSpec("P")
T = TypeVar("T")


class LocalExecutor(Executor):
    """Calls worker 0 directly; `execute` returns when the step is done. Where several steps may be in
    flight, the worker has a thread of its own, in which all its calls run in order;
    Python waits for that thread when a program ends, at Ctrl-C too."""

    def __init__(self, context: ExecutorContext) -> None:
        self._context = context
        self._worker: Worker | None = None
        self._thread = ThreadPoolExecutor(1, "worker") if context.depth > 1 else None

    def start(self) -> None:
        self._call(self._start).result()

    def execute(self, batch: StepBatch) -> Future[StepResult]:
        return self._call(self._started().execute, batch)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [self._call(self._started().call, method, *arguments).result()]

    def health(self) -> tuple[WorkerHealth, ...]:
        return ()

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._call(worker.close).result()
        if self._thread is not None:
            self._thread.shutdown()

    def _start(self) -> None:
        self._worker = self._context.worker(0)
        self._worker.start()

    def _started(self) -> Worker:
        if self._worker is None:
            raise EngineError("worker 0 is not running; call start first")
        return self._worker

    def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._thread is not None:
            return self._thread.submit(function, *args, **kwargs)
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
