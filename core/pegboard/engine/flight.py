"""Steps in flight: the workers have them, and nothing of them is committed yet."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from pegboard.engine.step_builder import Plan
from pegboard.errors import EngineError, described
from pegboard.interfaces.executor import Executor
from pegboard.step import StepBatch, StepResult


@dataclass(slots=True)
class Launched:
    """A step that the workers were given. Times are seconds of the monotonic clock.

    Attributes:
        plan, batch: the same step, for the host and for the workers.
        started: when its planning began, or the step ahead of it ended, if that was later.
        ended: when its result was there.
    """

    plan: Plan
    batch: StepBatch
    started: float
    ended: float = 0.0

    def end(self, _future: object = None) -> None:
        """Its result is there; what is noted first counts."""
        self.ended = self.ended or time.monotonic()


class Flight:
    """The steps in flight, at most `depth`, in the order in which they were launched and will land.

    Attributes:
        newest: id of the step that was launched last; -1: none was.
    """

    def __init__(self, executor: Executor, depth: int) -> None:
        self.newest = -1
        self._executor = executor
        self._depth = depth
        self._ended = 0.0
        self._steps: deque[tuple[Launched, Future[StepResult]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= self._depth

    @property
    def fence(self) -> int:
        """The newest step that has landed."""
        return self.newest - len(self._steps)

    def launch(self, step: Launched) -> None:
        """Gives a step to the workers. Raises EngineError when the executor does not take it."""
        self.newest = step.batch.step_id
        try:
            future = self._executor.execute(step.batch)
            # The caller may come late to commit it.
            future.add_done_callback(step.end)
            self._steps.append((step, future))
        except Exception as error:
            raise EngineError(f"the executor failed: {described(error)}") from error

    def land(self) -> tuple[Launched, StepResult]:
        """Waits for the oldest step, which is in flight no more.

        Raises:
            EngineError: the executor failed.
        """
        step, future = self._steps.popleft()
        try:
            result = future.result()
            if result.step_id != step.batch.step_id:
                raise EngineError(
                    f"step {step.batch.step_id} was answered by a result of step {result.step_id}"
                )
        except Exception as error:
            raise EngineError(f"the executor failed: {described(error)}") from error
        step.end()
        step.started = max(step.started, self._ended)
        self._ended = step.ended
        return step, result

    def clear(self) -> None:
        """Whatever is in flight, nobody waits for it."""
        self._steps.clear()
