"""The executor for one device: its worker lives in the engine's process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from pegboard.errors import EngineError
from pegboard.interfaces.executor import Executor, ExecutorContext, Worker, WorkerHealth
from pegboard.step import StepBatch, StepResult


class LocalExecutor(Executor):
    """Calls worker 0 directly; `execute` returns when the step is done."""

    def __init__(self, context: ExecutorContext) -> None:
        self._context = context
        self._worker: Worker | None = None

    def start(self) -> None:
        self._worker = self._context.worker(0)
        self._worker.start()

    def execute(self, batch: StepBatch) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._started().execute(batch))
        except Exception as error:
            future.set_exception(error)
        return future

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [self._started().call(method, *arguments)]

    def health(self) -> tuple[WorkerHealth, ...]:
        return ()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _started(self) -> Worker:
        if self._worker is None:
            raise EngineError("worker 0 is not running; call start first")
        return self._worker
