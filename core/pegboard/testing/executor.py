"""Contract suite of `Executor`.

    class TestMyExecutor(ExecutorContract):
        num_workers = 2                     # the ranks it is tested with
        own_processes = True                # its workers live in processes of their own

        @pytest.fixture
        def make(self):
            return MyExecutor               # called with an ExecutorContext

Its workers compute numbers, in this process or in their own (`testing.executor_worker`), and write
down when they were started and closed.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pegboard.interfaces.executor import Executor, ExecutorContext
from pegboard.testing.executor_worker import (
    ENDLESS_STEP,
    FAILING_STEP,
    EchoWorker,
    batch,
    expected,
    program,
)

MakeExecutor = Callable[[ExecutorContext], Executor]

TIMEOUT_S = 60.0

TOLD_S = 15.0
"""Within so long, what befell a worker is known."""

MOMENTS = ("start", "first step", "later step", "rest")


class ExecutorContract:
    """The contract of every executor."""

    num_workers: ClassVar[int] = 1
    own_processes: ClassVar[bool] = False

    @pytest.fixture
    def make(self) -> MakeExecutor:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    @pytest.fixture
    def context(self, tmp_path: Path) -> ExecutorContext:
        """Workers that write into the test's folder."""
        return ExecutorContext(
            devices=("cpu",) * self.num_workers,
            worker=partial(EchoWorker, tmp_path),
            worker_program=partial(program, tmp_path),
            on_built=lambda: _note(tmp_path, "built"),
            on_tensor=partial(_note, tmp_path),
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

    @pytest.mark.parametrize("num_ahead", [1, 5])
    def test_steps_are_answered_in_order(
        self, make: MakeExecutor, context: ExecutorContext, num_ahead: int
    ) -> None:
        """One after the other, and given before those in front of them are answered."""
        executor = make(context)
        executor.start()
        for first in range(0, 5, num_ahead):
            steps = [batch(first + i, num_rows=1 + first + i) for i in range(num_ahead)]
            for step, answer in zip(steps, [executor.execute(step) for step in steps], strict=True):
                result = answer.result(TIMEOUT_S)
                assert result.step_id == step.step_id
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

    def test_workers_live_where_the_suite_is_told(
        self, make: MakeExecutor, context: ExecutorContext, tmp_path: Path
    ) -> None:
        executor = make(context)
        assert executor.health() == ()
        executor.start()
        pids = self._pids(tmp_path)
        assert len(set(pids)) == (self.num_workers if self.own_processes else 1)
        assert (os.getpid() in pids) is not self.own_processes
        healths = executor.health()
        assert [health.rank for health in healths] == list(range(self.num_workers))[: len(healths)]
        assert bool(healths) is self.own_processes
        assert not any(health.ended for health in healths)
        executor.close()
        assert executor.health() == ()

    def test_a_start_in_other_processes_is_told_as_it_goes(
        self, make: MakeExecutor, context: ExecutorContext, tmp_path: Path
    ) -> None:
        executor = make(context)
        executor.start()
        executor.close()
        told = (tmp_path / "told").read_text().split("\n")[:-1] if self.own_processes else []
        assert told == (["built", "a tensor"] if self.own_processes else [])

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_killed_worker_is_an_error_and_leaves_nothing(
        self,
        make: MakeExecutor,
        context: ExecutorContext,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        moment: str,
    ) -> None:
        self._need_processes()
        temporary = _own_temporary_folder(tmp_path, monkeypatch)
        executor = make(context)
        answer = self._at(moment, executor, tmp_path)
        *_, last = pids = self._pids(tmp_path)
        os.kill(last, signal.SIGKILL)
        if answer is not None:
            failure = answer.exception(TOLD_S)
            assert failure is not None and f"worker {self.num_workers - 1} " in str(failure)
        _wait_for(lambda: bool(executor.health()[-1].ended))
        ended = executor.health()[-1].ended
        assert "SIGKILL" in ended and "\n" not in ended
        assert moment == "start" or (f"step {ENDLESS_STEP}" in ended) is (answer is not None)
        with pytest.raises(Exception, match="worker"):
            executor.execute(batch(20)).result(TOLD_S)
        _close_at_once(executor)
        assert not any(map(_is_there, pids))
        assert not list(temporary.iterdir())

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_stopped_worker_is_silent_and_holds_up_nobody(
        self,
        make: MakeExecutor,
        context: ExecutorContext,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        moment: str,
    ) -> None:
        self._need_processes()
        temporary = _own_temporary_folder(tmp_path, monkeypatch)
        executor = make(context)
        answer = self._at(moment, executor, tmp_path)
        pids = self._pids(tmp_path)
        _wait_for(lambda: executor.health()[-1].sign is not None)
        os.kill(pids[-1], signal.SIGSTOP)
        _wait_for(lambda: executor.health()[-1].silence_s > 1.5)
        if moment == "rest":
            os.kill(pids[-1], signal.SIGCONT)
            _wait_for(lambda: executor.health()[-1].silence_s < 1)
            step = batch(20)
            assert executor.execute(step).result(TIMEOUT_S).token_ids.tolist() == expected(step)
            os.kill(pids[-1], signal.SIGSTOP)
        assert not executor.health()[-1].ended
        _close_at_once(executor)
        if answer is not None:
            assert answer.exception(TOLD_S) is not None
        assert not any(map(_is_there, pids))
        assert not list(temporary.iterdir())

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

    def _need_processes(self) -> None:
        if not self.own_processes:
            pytest.skip("its workers live in the caller's process")

    def _pids(self, folder: Path) -> list[int]:
        return [int((folder / f"{rank}.pid").read_text()) for rank in range(self.num_workers)]

    def _at(self, moment: str, executor: Executor, folder: Path) -> Future[Any] | None:
        """Brings the workers to a moment in which they stay; what waits for them then."""
        if moment == "start":
            (folder / "hang").touch()
            started: Future[None] = Future()
            threading.Thread(target=_start, args=(executor, started), daemon=True).start()
            files = [folder / f"{rank}.pid" for rank in range(self.num_workers)]
            _wait_for(lambda: all(file.exists() and file.read_text() for file in files))
            return started
        executor.start()
        if moment == "later step":
            executor.execute(batch(0)).result(TIMEOUT_S)
        return None if moment == "rest" else executor.execute(batch(ENDLESS_STEP))


def _start(executor: Executor, started: Future[None]) -> None:
    try:
        started.set_result(executor.start())
    except Exception as error:
        started.set_exception(error)


def _note(folder: Path, what: str) -> None:
    with (folder / "told").open("a") as file:
        file.write(f"{what}\n")


def _own_temporary_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    temporary = folder / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return temporary


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TOLD_S
    while not condition():
        assert time.monotonic() < deadline, "it was not told of in time"
        time.sleep(0.05)


def _close_at_once(executor: Executor) -> None:
    began = time.monotonic()
    executor.close()
    assert time.monotonic() - began < TOLD_S


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
