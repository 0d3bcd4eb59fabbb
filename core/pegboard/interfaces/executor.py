"""`Executor`: where workers live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pegboard.step import StepBatch, StepResult

VERSION = 1


Doing = Literal["starting", "idle", "step"]


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """A sign of life, which a process sends once a second from a thread of its own.

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


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker's process is.

    Attributes:
        rank: the worker's.
        sign: the last that it gave; None: none yet.
        silence_s: seconds since it was heard of; time in which the executor itself stood still does
            not count.
        ended: how the process ended and what it was doing, in one line; "": it is there.
    """

    rank: int
    sign: Sign | None
    silence_s: float
    ended: str = ""


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """A worker for a process of its own; how it is spoken to is in `interfaces.worker_process`.

    Attributes:
        argv: of the process.
        composition: what the worker is built from, as JSON.
        digest: of the composition; the process compares it before it loads anything.
    """

    argv: Sequence[str]
    composition: bytes
    digest: str


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """The context of an executor's factory.

    Attributes:
        devices: one entry a rank, `cpu` or `cuda:0`, ...
        worker: (rank) -> a worker in this process. Its building and loading is told without the
            executor's help.
        worker_program: (rank) -> a worker for a process of its own. Raises CompositionRefused where it
            would need an object of this process.
        on_built: to be called, in the thread that called `start`, once the parts of all workers in
            processes of their own are made and none has loaded a weight.
        on_tensor: to be called there with the name of each parameter that rank 0 has loaded.
        depth: most steps that are given before the oldest of them is committed.
    """

    devices: Sequence[str]
    worker: Callable[[int], Worker]
    worker_program: Callable[[int], WorkerProgram]
    on_built: Callable[[], None]
    on_tensor: Callable[[str], None]
    depth: int = 1


class Executor(ABC):
    """Carries the two messages to the workers and back.

    One thread calls it, but for `health`. A worker that dies is an EngineError that says how, of what is
    in flight and of whatever is asked later.
    """

    @abstractmethod
    def start(self) -> None:
        """Starts the workers. Raises what a worker's start raised; KernelUnusable as itself, what else a
        user can mend as UserError."""

    @abstractmethod
    def execute(self, batch: StepBatch) -> Future[StepResult]:
        """Runs a step on all workers; steps run in the order in which they were given. An exception of a
        worker is the future's."""

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> list[Any]:
        """`Worker.call` on each worker, by rank, once the steps that were given before are done."""

    @abstractmethod
    def health(self) -> tuple[WorkerHealth, ...]:
        """How the workers' processes are, by rank; none for workers in this process, before the start and
        once `close` was called. Any thread may ask at any time, and is answered at once: the engine's
        signs of life wait for the answer, and an engine that gives none is ended."""

    @abstractmethod
    def close(self) -> None:
        """Ends the workers and frees their memory. Idempotent.

        Processes are ended whatever they are doing; a worker in this process is waited for until the
        steps that it was given are done."""
