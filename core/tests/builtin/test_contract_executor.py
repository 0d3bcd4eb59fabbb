"""The built-in executor keeps its contract."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pegboard.builtin.local_executor import LocalExecutor
from pegboard.interfaces.executor import ExecutorContext
from pegboard.step import StepBatch, StepResult
from pegboard.testing.executor import ExecutorContract, MakeExecutor
from pegboard.testing.executor_worker import EchoWorker, batch


class TestLocalExecutor(ExecutorContract):
    @pytest.fixture
    def make(self) -> MakeExecutor:
        return LocalExecutor


class TestLocalExecutorOfDepthTwo(ExecutorContract):
    @pytest.fixture
    def make(self) -> MakeExecutor:
        return lambda context: LocalExecutor(replace(context, depth=2))

    def test_the_caller_goes_on_while_a_step_runs(
        self, make: MakeExecutor, context: ExecutorContext, tmp_path: Path
    ) -> None:
        free = threading.Event()

        class Waits(EchoWorker):
            def execute(self, batch: StepBatch) -> StepResult:
                assert free.wait(60), "nobody went on"
                return super().execute(batch)

        executor = make(replace(context, worker=partial(Waits, tmp_path)))
        executor.start()
        results = [executor.execute(batch(step_id)) for step_id in range(2)]
        assert not any(result.done() for result in results)
        free.set()
        assert executor.call("memory")[0]["method"] == "memory"
        assert [result.result(0).step_id for result in results] == [0, 1]
        executor.close()
