"""Workers of the executors' suite: a class for this process, and a program for one of its own.

`python -m pegboard.testing.executor_worker FOLDER RANK SOCKET` serves the frames that
`pegboard.runner_main` documents. A worker leaves a line of its life in the file FOLDER/RANK.
"""

from __future__ import annotations

import socket
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pegboard.interfaces.executor import Worker
from pegboard.step import StepBatch, StepResult, decode, encode

FAILING_STEP = 13
"""The worker of rank 0 raises at this step, and goes on afterwards."""

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
    """Answers a step by numbers made of it; `fails` makes its start raise."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._diary = folder / str(rank)
        self._rank = rank
        self._fails = (folder / "fail").exists()

    def start(self) -> None:
        if self._fails:
            raise RuntimeError("the weights are missing")
        self._write("started")

    def execute(self, batch: StepBatch) -> StepResult:
        if batch.step_id == FAILING_STEP and self._rank == 0:
            raise RuntimeError(f"step {batch.step_id} went wrong")
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
        with self._diary.open("a") as file:
            file.write(f"{line}\n")


def main(argv: list[str]) -> None:
    """Serves one worker until its peer closes."""
    worker = EchoWorker(Path(argv[0]), int(argv[1]))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(argv[2])
        stream = peer.makefile("rwb")
        _send(stream, ["hello", DIGEST])
        while header := stream.read(4):
            frame = msgspec.msgpack.decode(stream.read(struct.unpack("<I", header)[0]))
            try:
                answer = ["ok", _answer(worker, frame)]
            except Exception as error:
                answer = ["error", str(error)]
            _send(stream, answer)
            if frame[0] == "close":
                return
        worker.close()


def _answer(worker: EchoWorker, frame: list[Any]) -> Any:
    match frame:
        case ["start"]:
            return worker.start()
        case ["execute", bytes(data)]:
            return encode(worker.execute(decode(data, StepBatch)))
        case ["call", str(method), *arguments]:
            return worker.call(method, *arguments)
        case ["close"]:
            return worker.close()
    raise ValueError(f"unknown frame {frame[:1]}")


def _send(stream: Any, message: list[Any]) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
