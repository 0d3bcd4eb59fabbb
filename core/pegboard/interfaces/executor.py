"""`Executor`: where workers live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pegboard.step import StepBatch, StepResult

VERSION = 0


Doing = Literal["starting", "idle", "step"]


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says of itself once a second, from a thread of its own.

    Attributes:
        doing: `starting` until its weights are loaded, then `step` or `idle`.
        step_id: the step that runs, or the last one; -1: none has begun.
        age_s: seconds that it has been doing so.
    """

    doing: Doing
    step_id: int
    age_s: float

    def __str__(self) -> str:
        doing = f"in step {self.step_id}" if self.doing == "step" else self.doing
        return f"{doing} for {self.age_s:.1f} s"


class Worker(ABC):
    """One rank: a model, its KV tensors, its rows."""

    @abstractmethod
    def start(self) -> None:
        """Loads weights, allocates KV."""

    @abstractmethod
    def execute(self, batch: StepBatch) -> StepResult:
        """Runs one step."""

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> Any:
        """A rare question by name: `memory` (bytes by ledger entry), `block_checksums` (group, blocks: a
        number for each block). Arguments and answer are plain values."""

    @abstractmethod
    def close(self) -> None:
        """Frees all memory. Idempotent."""


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """What an executor's factory gets.

    Attributes:
        devices: one entry a rank, `cpu` or `cuda:0`, ...
        worker: (rank) -> a worker in this process.
        worker_command: (rank) -> argv of a process that serves one worker over a Unix socket whose
            path is appended; see `pegboard.runner_main` for the frames.
    """

    devices: Sequence[str]
    worker: Callable[[int], Worker]
    worker_command: Callable[[int], Sequence[str]]


class Executor(ABC):
    """Carries the two messages to the workers and back."""

    @abstractmethod
    def start(self) -> None:
        """Starts the workers. Raises what a worker's start raised."""

    @abstractmethod
    def execute(self, batch: StepBatch) -> Future[StepResult]:
        """Runs a step on all workers. An exception of a worker is the future's."""

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> list[Any]:
        """`Worker.call` on each worker, by rank. No step is in flight."""

    @abstractmethod
    def health(self) -> str | None:
        """None while all workers live; else one line saying what happened."""

    @abstractmethod
    def close(self) -> None:
        """Ends the workers and frees their memory. Idempotent."""
