"""Signs of life: what a process tells of itself once a second, from a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

import zmq

from pegboard.interfaces.executor import Doing, Sign

PERIOD_S = 1.0

logger = logging.getLogger(__name__)


class Life:
    """The activity of this process. One thread notes it as it goes; any thread may ask for a `sign`.

    Attributes:
        worst_step_s: seconds of the longest step that has ended.
    """

    def __init__(self) -> None:
        self.worst_step_s = 0.0
        self._state: tuple[Doing, int, float] = ("starting", -1, time.monotonic())

    def rest(self) -> None:
        """The start is over, and no step runs."""
        self._state = ("idle", self._state[1], time.monotonic())

    @contextlib.contextmanager
    def step(self, step_id: int) -> Iterator[None]:
        """While a step runs."""
        started = time.monotonic()
        self._state = ("step", step_id, started)
        try:
            yield
        finally:
            self.worst_step_s = max(self.worst_step_s, time.monotonic() - started)
            self.rest()

    def sign(self) -> Sign:
        """The present activity."""
        doing, step_id, since = self._state
        return Sign(doing=doing, step_id=step_id, age_s=time.monotonic() - since)


class SignSender:
    """Sends a message once a second, from a thread and over a ZeroMQ socket of its own, until it is
    closed. Where nobody receives, messages are dropped.

    Args:
        connect: gives the socket its keys, and the address to send to.
        message: makes a message; it runs in the thread. A message that it raises for is left out.
    """

    def __init__(
        self, connect: Callable[[zmq.Socket[bytes]], object], message: Callable[[], bytes]
    ) -> None:
        self._message = message
        self._has_failed = False
        # Here and not in the thread, so that what cannot be connected is raised.
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.sndhwm = 2
        self._socket.linger = 0
        connect(self._socket)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="life", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        with self._context, self._socket:
            self._send()
            while not self._closed.wait(PERIOD_S):
                self._send()

    def _send(self) -> None:
        try:
            with contextlib.suppress(zmq.Again):
                self._socket.send(self._message(), zmq.NOBLOCK)
        except BaseException:  # of a plugin that it asks; the next one may be made
            if not self._has_failed:
                logger.exception("a sign of life could not be sent")
            self._has_failed = True
