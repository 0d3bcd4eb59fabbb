"""The workers of the executors' suite, in this process or in ones of their own: see `programs`.

A worker leaves a line of its life in the file FOLDER/RANK, and its process's id in FOLDER/RANK.pid. How
its start goes is said by a file `fail` or `hang` in the folder.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pegboard.interfaces.executor import Worker, WorkerProgram
from pegboard.step import StepBatch, StepResult

FAILING_STEP = 13
"""The worker of rank 0 raises at this step, and goes on afterwards."""

ENDLESS_STEP = 14
"""No worker ever answers this step."""

DIGEST = "digest of the suite"


def batch(step_id: int, num_rows: int = 3) -> StepBatch:
    """A step that `EchoWorker` understands."""
    rows = np.arange(num_rows, dtype=np.int32)
    ones, none = np.ones(num_rows, np.int32), np.zeros(num_rows, np.int32)
    return StepBatch(
        step_id=step_id,
        fence=step_id - 1,
        released=(),
        admitted=(),
        groups=(),
        rows=rows,
        num_computed=rows * 10 + step_id,
        num_tokens=ones,
        sample=ones.astype(np.bool_),
        verify=none,
        propose=none,
        pending=none.astype(np.bool_),
    )


def expected(step: StepBatch) -> list[int]:
    """The tokens of its result."""
    tokens: list[int] = (step.num_computed * 2 + 1).tolist()
    return tokens


class EchoWorker(Worker):
    """Answers a step by numbers made of it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        (folder / f"{rank}.pid").write_text(str(os.getpid()))

    def start(self) -> None:
        if (self._folder / "fail").exists():
            raise RuntimeError("the weights are missing")
        if (self._folder / "hang").exists():
            time.sleep(10_000)
        self._write("started")

    def execute(self, batch: StepBatch) -> StepResult:
        if batch.step_id == FAILING_STEP and self._rank == 0:
            raise RuntimeError(f"step {batch.step_id} went wrong")
        if batch.step_id == ENDLESS_STEP:
            time.sleep(10_000)
        num_rows = len(batch.rows)
        none = np.zeros(num_rows, np.int32)
        return StepResult(
            step_id=batch.step_id,
            offsets=np.arange(num_rows + 1, dtype=np.int32),
            token_ids=np.array(expected(batch), np.int32),
            num_accepted=none,
            num_tried=none,
            num_drafts=none,
            confidences=np.zeros(0, np.float32),
        )

    def call(self, method: str, *arguments: Any) -> Any:
        return {"method": method, "arguments": list(arguments), "rank": self._rank}

    def close(self) -> None:
        self._write("closed")

    def _write(self, line: str) -> None:
        with (self._folder / str(self._rank)).open("a") as file:
            file.write(f"{line}\n")


def program(folder: Path, rank: int) -> WorkerProgram:
    """An `EchoWorker` in a process of its own."""
    start = f"{__name__}:start_worker"
    argv = [sys.executable, "-m", "pegboard.runner_main", str(rank), "--start", start]
    return WorkerProgram(argv, msgspec.json.encode(str(folder)), DIGEST)


def start_worker(
    composition: bytes,
    digest: str,
    rank: int,
    on_built: Callable[[], None],
    on_tensor: Callable[[str], None],
) -> Worker:
    """As `pegboard.compose.start_worker`, of what `program` made."""
    assert digest == DIGEST
    worker = EchoWorker(Path(msgspec.json.decode(composition, type=str)), rank)
    on_built()
    on_tensor("a tensor")
    worker.start()
    return worker
