"""`Executor`: where workers live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pegboard.step import StepBatch, StepResult

VERSION = 0


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
