"""The server's side of the engine's process: it starts it, talks to it, and notices its death."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Sequence

import zmq
import zmq.asyncio

from pegboard.errors import (
    ConfigError,
    EngineDied,
    EngineError,
    PegboardError,
    RequestFailed,
    UserError,
)
from pegboard.request import Request
from pegboard.server import messages
from pegboard.server.engine_watch import TICK_S, EngineWatch
from pegboard.server.keys import without_keys
from pegboard.server.submission import Submission
from pegboard.server.waiting import Waiting

ENGINE_COMMAND = (sys.executable, "-P", "-m", f"{__package__}.engine_process")
"""It is followed by the socket's address and this process's id."""

STOP_S = 10.0
"""Seconds that the engine's process may take to close before it is killed."""

logger = logging.getLogger("pegboard.server")


class EngineClient:
    """One engine process.

    Attributes:
        loaded: part of the weights that is loaded, 0 to 1.
        facts: what the engine said when it was ready; None until then.
        status: its last one, and `status_time` (monotonic seconds) when that came; None: none came.
        waiting: sequences that have not brought a token yet.
    """

    def __init__(self, start: messages.Start, watch: EngineWatch) -> None:
        """
        Args:
            start: the config to build the engine of.
            watch: judges whether it lives.
        """
        self.loaded = 0.0
        self.facts: messages.Ready | None = None
        self.status = messages.Status(metrics="", num_running=0, num_waiting=0)
        self.status_time: float | None = None
        self._watch = watch
        self._start = start
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._signs = self._context.socket(zmq.PULL)
        self._submissions: dict[str, Submission] = {}
        self.waiting = Waiting()
        self._resets: deque[asyncio.Future[None]] = deque()
        self._process: Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        self._built: asyncio.Future[None] = loop.create_future()
        self._ready: asyncio.Future[messages.Ready] = loop.create_future()
        self._ended: asyncio.Future[PegboardError] = loop.create_future()

    @property
    def failure(self) -> PegboardError | None:
        """The error by which the engine is gone; None while it lives."""
        return self._ended.result() if self._ended.done() else None

    @property
    def silent(self) -> str | None:
        """The process that gives no sign of life though it exists; None: all do."""
        return self._watch.silent()

    @property
    def num_open(self) -> int:
        """Requests that have not finished."""
        return len(self._submissions)

    async def start(self) -> messages.Ready:
        """Spawns the process and waits until it takes requests.

        Raises:
            UserError: the engine cannot be built, for a reason that the user can mend.
            EngineDied: it ended for another reason.
            OSError: the system has no folder or no process for it.
        """
        # The folder's mode is 0700, and nobody needs it once the one peer is connected.
        with tempfile.TemporaryDirectory(prefix="pegboard-") as folder:
            address = f"ipc://{folder}/engine"
            self._bind(address, folder)
            # The child reads its input to learn of this process's end, so the pipe stays open. A terminal's
            # Ctrl-C is for this process, which ends the child: so that has a group of its own.
            self._process = await asyncio.create_subprocess_exec(
                *ENGINE_COMMAND,
                address,
                str(os.getpid()),
                stdin=PIPE,
                env=without_keys(os.environ),
                process_group=0,
            )
            judge, await_exit = self._judge(self._process), self._await_exit(self._process)
            work = (self._receive(), self._hear(), judge, await_exit)
            self._tasks = [asyncio.create_task(one) for one in work]
            self._send(self._start)
            self.facts = await self._ready
        return self.facts

    async def built(self) -> None:
        """Waits until all parts of the engine are made.

        Raises:
            UserError, EngineDied: as `start`.
        """
        await asyncio.shield(self._built)

    async def ended(self) -> PegboardError:
        """Waits until the process has ended; says why."""
        return await asyncio.shield(self._ended)

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Gives requests to the engine, all or none.

        Raises:
            EngineError: the engine is not ready, or gone.
        """
        self._check_ready()
        # A message that cannot be encoded has left nothing behind.
        message = messages.encode(messages.Add(tuple(requests)))
        submission = Submission(requests, self._close)
        for request in requests:
            self._submissions[request.request_id] = submission
            self.waiting.add(request)
        self._socket.send(message)
        return submission

    async def reset_prefix_cache(self) -> None:
        """Waits until the engine has forgotten what its prefix cache knew.

        Raises:
            EngineError: the engine is not ready, or gone before it answered.
        """
        self._check_ready()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resets.append(done)
        self._send(messages.Reset())
        await done

    def fail_open(self, error: PegboardError) -> None:
        """Ends all open requests with an error; the engine is told to forget them."""
        open_ids = tuple(self._submissions)
        for submission in set(self._submissions.values()):
            submission.fail(error)
        self._forget(open_ids)
        if open_ids and self.failure is None:
            self._send(messages.Abort(open_ids))

    async def stop(self) -> None:
        """Ends the process: asks, waits, then kills. Idempotent."""
        process = self._process
        if process is not None and process.returncode is None:
            if self.facts is not None:
                self._send(messages.Stop())
                await asyncio.wait({self._ended}, timeout=STOP_S)
            if process.returncode is None:
                process.kill()
            await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    def _bind(self, address: str, folder: str) -> None:
        try:
            self._socket.bind(address)
            self._signs.bind(messages.life_of(address))
        except zmq.ZMQError as error:
            raise ConfigError(
                "TMPDIR",
                f"no socket can be made in {folder}: {error.strerror}",
                fix="set it to a folder that can be written, whose path is short",
            ) from None

    def _check_ready(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.facts is None:
            raise EngineError("the model is loading")

    def _send(self, message: messages.ToEngine) -> None:
        # The send happens at once, or in the background while nobody is connected yet; not waiting
        # for it lets an abort leave from a task that is being cancelled.
        self._socket.send(messages.encode(message))

    async def _receive(self) -> None:
        while True:
            self._dispatch(messages.decode_from_engine(await self._socket.recv()))

    def _dispatch(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Deltas():
                self._deliver(message)
            case messages.Status():
                self.status, self.status_time = message, time.monotonic()
            case messages.Refused():
                self._refuse(message.request_ids, message.error())
            case messages.Faulted():
                self._refuse(message.request_ids, RequestFailed(message.line))
            case messages.ResetDone():
                self._confirm_reset()
            case messages.Built():
                self._note_built()
            case messages.Loading():
                self.loaded = message.num_loaded / message.num_total
            case messages.Ready():
                self._note_built()
                self._watch.started()
                self._ready.set_result(message)
            case messages.Failed():
                failure = UserError(message.line) if message.mistake else EngineDied(message.line)
                self._die(failure)

    def _note_built(self) -> None:
        # Once more, where kernels failed their self-tests and others took their place.
        if not self._built.done():
            self._built.set_result(None)

    def _deliver(self, message: messages.Deltas) -> None:
        for delta in message.deltas:
            if submission := self._submissions.get(delta.request_id):
                self.waiting.begin(delta)
                submission.push(delta)

    def _refuse(self, request_ids: Sequence[str], error: PegboardError) -> None:
        for request_id in request_ids:
            if submission := self._submissions.get(request_id):
                submission.fail(error)
        self._forget(request_ids)

    def _confirm_reset(self) -> None:
        done = self._resets.popleft()
        if not done.done():  # whoever asked may have gone
            done.set_result(None)

    def _close(self, submission: Submission, unfinished: tuple[str, ...]) -> None:
        known = tuple(request_id for request_id in unfinished if request_id in self._submissions)
        self._forget(tuple(request.request_id for request in submission.requests))
        if known and self.failure is None:
            self._send(messages.Abort(known))

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._submissions.pop(request_id, None)
            self.waiting.forget(request_id)

    async def _hear(self) -> None:
        while True:
            self._watch.hear(messages.decode_alive(await self._signs.recv()))

    async def _judge(self, process: Process) -> None:
        """Kills an engine that will not go on."""
        then = time.monotonic()
        while (lost := self._watch.lost()) is None:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._watch.tick(now - then)
            then = now
        running, waiting = self.status.num_running, self.status.num_waiting
        self._die(EngineDied(f"{lost}; sequences running: {running}, waiting: {waiting}"))
        if process.returncode is None:
            process.kill()

    async def _await_exit(self, process: Process) -> None:
        status = await process.wait()
        # Its last words may still be on their way.
        await asyncio.sleep(0.1)
        self._die(EngineDied(f"the engine's process ended with status {status}"))

    def _die(self, failure: PegboardError) -> None:
        if self._ended.done():
            return
        self._ended.set_result(failure)
        for waited in (self._built, self._ready):
            if not waited.done():
                waited.set_exception(failure)
                waited.exception()  # whoever waited for it may have gone
        reason = failure if isinstance(failure, EngineDied) else EngineDied(str(failure))
        for done in self._resets:
            if not done.done():
                done.set_exception(reason)
        self.fail_open(reason)
