"""The built-in executor keeps its contract."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

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


def test_with_a_depth_of_two_the_caller_goes_on_while_a_step_runs() -> None:
    free = threading.Event()

    class Waits(EchoWorker):
        def execute(self, batch: StepBatch) -> StepResult:
            assert free.wait(60), "nobody went on"
            return super().execute(batch)

    with TemporaryDirectory() as folder:
        context = ExecutorContext(
            devices=("cpu",), worker=partial(Waits, Path(folder)), worker_command=_none, depth=2
        )
        executor = LocalExecutor(context)
        executor.start()
        results = [executor.execute(batch(step_id)) for step_id in range(2)]
        assert not any(result.done() for result in results)
        free.set()
        assert executor.call("memory")[0]["method"] == "memory"
        assert [result.result(0).step_id for result in results] == [0, 1]
        executor.close()


def _none(rank: int) -> list[str]:
    raise AssertionError("it needs no process")
