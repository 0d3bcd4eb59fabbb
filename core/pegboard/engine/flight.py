"""Steps in flight: given to the workers, and not committed yet."""

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
    """A step in flight. Times are seconds of the monotonic clock.

    Attributes:
        plan, batch: of the step, for the host and for the workers.
        started: when its planning began, or the step ahead of it ended, if that was later.
        ended: when its result was there.
    """

    plan: Plan
    batch: StepBatch
    started: float
    ended: float = 0.0

    def end(self, _future: object = None) -> None:
        """Notes the time of its result; only the first call counts."""
        self.ended = self.ended or time.monotonic()


class Flight:
    """The steps in flight, at most `depth`. They land in the order of their launch.

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
            # The caller may commit it later.
            future.add_done_callback(step.end)
            self._steps.append((step, future))
        except Exception as error:
            raise EngineError(f"the executor failed: {described(error)}") from error

    def land(self) -> tuple[Launched, StepResult]:
        """Takes the oldest step out of flight, and waits for its result.

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
        """Drops all steps in flight; nobody waits for them."""
        self._steps.clear()
