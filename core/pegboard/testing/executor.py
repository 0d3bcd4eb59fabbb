"""Contract suite of `Executor`.

    class TestMyExecutor(ExecutorContract):
        num_workers = 2                     # the ranks it is tested with

        @pytest.fixture
        def make(self):
            return MyExecutor               # called with an ExecutorContext

Its workers compute numbers, in this process or in their own (`testing.executor_worker`), and write
down when they were started and closed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from pegboard.interfaces.executor import Executor, ExecutorContext
from pegboard.testing.executor_worker import FAILING_STEP, EchoWorker, batch, expected

MakeExecutor = Callable[[ExecutorContext], Executor]

TIMEOUT_S = 60.0


class ExecutorContract:
    """The contract of every executor."""

    num_workers: ClassVar[int] = 1

    @pytest.fixture
    def make(self) -> MakeExecutor:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    @pytest.fixture
    def context(self, tmp_path: Path) -> ExecutorContext:
        """Workers that write into the test's folder."""
        program = [sys.executable, "-m", "pegboard.testing.executor_worker", str(tmp_path)]
        return ExecutorContext(
            devices=("cpu",) * self.num_workers,
            worker=lambda rank: EchoWorker(tmp_path, rank),
            worker_command=lambda rank: [*program, str(rank)],
        )

    @pytest.fixture
    def diaries(self, tmp_path: Path) -> Callable[[], list[list[str]]]:
        """Reads what each worker wrote, by rank."""

        def read() -> list[list[str]]:
            files = [tmp_path / str(rank) for rank in range(self.num_workers)]
            return [file.read_text().split() if file.exists() else [] for file in files]

        return read

    def test_every_worker_is_started_and_closed(
        self,
        make: MakeExecutor,
        context: ExecutorContext,
        diaries: Callable[[], list[list[str]]],
    ) -> None:
        executor = make(context)
        executor.start()
        assert diaries() == [["started"]] * self.num_workers
        executor.close()
        assert diaries() == [["started", "closed"]] * self.num_workers

    def test_steps_are_answered_in_order(
        self, make: MakeExecutor, context: ExecutorContext
    ) -> None:
        executor = make(context)
        executor.start()
        for step_id in range(5):
            step = batch(step_id, num_rows=1 + step_id)
            result = executor.execute(step).result(TIMEOUT_S)
            assert result.step_id == step_id
            assert result.token_ids.tolist() == expected(step)
        executor.close()

    def test_what_a_step_raises_is_the_futures(
        self, make: MakeExecutor, context: ExecutorContext
    ) -> None:
        executor = make(context)
        executor.start()
        failure = executor.execute(batch(FAILING_STEP)).exception(TIMEOUT_S)
        assert failure is not None and f"step {FAILING_STEP} went wrong" in str(failure)
        executor.close()

    def test_what_a_start_raises_is_raised(
        self, make: MakeExecutor, context: ExecutorContext, tmp_path: Path
    ) -> None:
        (tmp_path / "fail").touch()
        executor = make(context)
        with pytest.raises(Exception, match="the weights are missing"):
            executor.start()
        executor.close()

    def test_questions_are_answered_by_rank(
        self, make: MakeExecutor, context: ExecutorContext
    ) -> None:
        executor = make(context)
        executor.start()
        for arguments in ([], [1, [5, 2]]):
            answers = [
                {"method": "memory", "arguments": arguments, "rank": rank}
                for rank in range(self.num_workers)
            ]
            assert executor.call("memory", *arguments) == answers
        executor.close()

    def test_health_is_none_while_all_live(
        self, make: MakeExecutor, context: ExecutorContext
    ) -> None:
        executor = make(context)
        executor.start()
        assert executor.health() is None
        executor.close()
        said = executor.health()
        assert said is not None and said and "\n" not in said

    def test_closing_twice_does_nothing(
        self,
        make: MakeExecutor,
        context: ExecutorContext,
        diaries: Callable[[], list[list[str]]],
    ) -> None:
        executor = make(context)
        executor.start()
        executor.close()
        executor.close()
        assert diaries() == [["started", "closed"]] * self.num_workers

    def test_closing_before_the_start_does_nothing(
        self, make: MakeExecutor, context: ExecutorContext
    ) -> None:
        make(context).close()
