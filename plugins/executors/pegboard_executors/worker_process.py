"""One worker's process: its requests, its signs of life, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pegboard.errors import EngineError, KernelUnusable, UserError
from pegboard.interfaces.executor import Sign, WorkerHealth
from pegboard.interfaces.worker_process import Alive, Done, Failed, FromWorker, ToWorker
from pegboard_executors.link import Link


@dataclass
class _Asked:
    """A request that is not answered yet; `what` is for messages."""

    what: str
    answer: Future[Any] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class WorkerProcess:
    """A process that serves the worker of a rank.

    Requests come from one thread; another one starts the process, gives it what the link has received,
    and looks after it.
    """

    def __init__(self, rank: int, argv: Sequence[str], link: Link) -> None:
        self._rank = rank
        self._argv = list(argv)
        self._link = link
        self._process: subprocess.Popen[bytes] | None = None
        self._open: deque[_Asked] = deque()
        self._lock = threading.Lock()  # between a request and the process's end
        self._ended = ""
        self._has_started = False
        self._sign: Sign | None = None
        self._silence_s = 0.0

    def spawn(self, launch: Sequence[str]) -> None:
        """Starts the process, in a thread that lives as long: Linux ends the process with it.

        Raises:
            OSError: the system cannot start it.
            ValueError: a word of the command is no argument for the system.
        """
        argv = [*launch, *self._argv]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, bufsize=0)
        connection = self._link.connection(self._rank, None if launch else os.getpid())
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed by `look`
            self._process.stdin.write(msgspec.json.encode(connection) + b"\n")

    def ask(self, what: str, request: ToWorker) -> Future[Any]:
        """The answer to a request, which is what the worker answers or raises, or an EngineError when it
        cannot answer any more."""
        asked = _Asked(what)
        with self._lock:
            ended = self._ended
            if not ended:
                self._open.append(asked)
        if ended:
            asked.answer.set_exception(EngineError(ended))
        elif not self._link.send(self._rank, request):
            self.end("is not connected any more")
        return asked.answer

    def heed(self, message: FromWorker) -> None:
        """Takes what the process said."""
        self._silence_s = 0.0
        match message:
            case Alive(sign=sign):
                self._sign = sign
            case Done(value=value):
                self._has_started = True
                if (asked := self._oldest()) is not None:
                    asked.answer.set_result(value)
            case Failed():
                if (asked := self._oldest()) is not None:
                    asked.answer.set_exception(_raised(message))

    def look(self, elapsed_s: float) -> None:
        """Notices the process's end, and that so much time has passed."""
        self._silence_s += elapsed_s
        status = None if self._process is None else self._process.poll()
        if status is not None:
            self.end(_how(status))

    def end(self, how: str) -> None:
        """From now on nothing is answered. Kills the process where it is still there."""
        with self._lock:
            if self._ended:
                return
            self._ended = f"worker {self._rank} {how} while {self._doing()}"
            left = tuple(self._open)
            self._open.clear()
        if self._process is not None:
            self._process.kill()
            assert self._process.stdin is not None
            self._process.stdin.close()
        for asked in left:
            asked.answer.set_exception(EngineError(self._ended))

    def wait(self, timeout_s: float) -> bool:
        """Whether the process has ended, within a time."""
        if self._process is None:
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            return True
        return False

    @property
    def is_free(self) -> bool:
        """Whether it could take a request at once."""
        return not self._open and not self._ended

    @property
    def ended(self) -> str:
        """How it ended; "": it has not."""
        return self._ended

    def health(self) -> WorkerHealth:
        return WorkerHealth(
            rank=self._rank, sign=self._sign, silence_s=self._silence_s, ended=self._ended
        )

    def _oldest(self) -> _Asked | None:
        """The request that was answered; None: the process has been given up."""
        with self._lock:
            return self._open.popleft() if self._open else None

    def _doing(self) -> str:
        if not self._open:
            return "idle" if self._has_started else "starting"
        oldest = self._open[0]
        return f"{oldest.what} for {time.monotonic() - oldest.since:.1f} s"


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _raised(failed: Failed) -> Exception:
    kernel = failed.kernel
    if kernel is not None:
        return KernelUnusable(kernel.operation, kernel.family, kernel.reason, named=kernel.named)
    return UserError(failed.line) if failed.mistake else EngineError(failed.line)
