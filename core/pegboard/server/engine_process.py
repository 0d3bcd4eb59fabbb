"""The engine's process: `python -m pegboard.server.engine_process ADDRESS PARENT_PID`.

It runs the engine that the server prepared, then loops: drain the socket, step, push. A thread tells the
server once a second what the loop is doing.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import time
from collections.abc import Sequence

import msgspec
import zmq

from pegboard.compose import Prepared, Starting, from_wire, start_engine
from pegboard.engine.core import EngineCore
from pegboard.errors import (
    INTERRUPTS,
    RequestError,
    RequestFailed,
    UserError,
    described,
    printable,
)
from pegboard.interfaces.executor import WorkerHealth
from pegboard.life import Life, SignSender
from pegboard.lifeline import end_with_parent, leave_signals_to_parent
from pegboard.logs import configure_logging
from pegboard.progress import progress_bar
from pegboard.server import messages
from pegboard.server.startup_lines import log_loaded

STATUS_PERIOD_S = 1.0

logger = logging.getLogger("pegboard.server")


class Channel:
    """The socket to the server's process."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send(self, message: messages.FromEngine) -> None:
        self._socket.send(messages.encode(message))

    def receive(self) -> messages.ToEngine:
        """Waits for the next message."""
        return messages.decode_to_engine(self._socket.recv())

    def wait(self, timeout_s: float) -> bool:
        """Whether a message is there, within a time."""
        return bool(self._socket.poll(round(timeout_s * 1000)))

    def close(self) -> None:
        """Closes the socket once all that was sent has left."""
        self._context.destroy()


class Pulse:
    """The signs of life that the server is sent once a second, by a thread of its own.

    Attributes:
        life: what the loop is doing.
    """

    def __init__(self) -> None:
        self.life = Life()
        self._engine: EngineCore | None = None

    def watch(self, engine: EngineCore) -> None:
        """Its workers are told of from now on."""
        self._engine = engine

    def message(self) -> bytes:
        workers: tuple[WorkerHealth, ...] = ()
        try:
            if self._engine is not None:
                workers = msgspec.convert(self._engine.health(), tuple[WorkerHealth, ...])
            return self._with(workers)
        except INTERRUPTS:
            raise
        except BaseException as error:  # of another's executor
            line = f"the executor cannot say how its workers are: {printable(described(error))}"
            return self._with((WorkerHealth(rank=0, sign=None, silence_s=0.0, ended=line),))

    def _with(self, workers: tuple[WorkerHealth, ...]) -> bytes:
        return messages.encode(messages.Alive(self.life.sign(), self.life.worst_step_s, workers))


class EngineLoop:
    """Runs an engine for the server until it is told to stop."""

    def __init__(self, engine: EngineCore, channel: Channel, life: Life) -> None:
        self._engine = engine
        self._channel = channel
        self._life = life
        self._next_status = 0.0
        self._stopped = False

    def run(self) -> None:
        self._life.rest()
        while not self._stopped:
            if not self._engine.has_work():
                # An idle engine sleeps here until a message comes or the next status is due.
                self._channel.wait(max(self._next_status - time.monotonic(), 0.0))
            with self._life.step(self._engine.step_id):
                self._turn()

    def _turn(self) -> None:
        while not self._stopped and self._channel.wait(0.0):
            self._heed(self._channel.receive())
        if self._engine.has_work():
            self._step()
        self._report()

    def _heed(self, message: messages.ToEngine) -> None:
        match message:
            case messages.Add():
                self._add(message)
            case messages.Abort():
                for request_id in message.request_ids:
                    self._engine.abort(request_id)
            case messages.Reset():
                self._engine.reset_prefix_cache()
                self._channel.send(messages.ResetDone())
            case messages.Stop():
                self._stopped = True
            case messages.Start():
                raise AssertionError("the engine has started")

    def _add(self, message: messages.Add) -> None:
        ids = tuple(request.request_id for request in message.requests)
        num_taken = 0
        try:
            for request in message.requests:
                self._engine.add(request)
                num_taken += 1
            return
        except RequestError as error:
            answer: messages.FromEngine = messages.Refused(
                ids, error.param, error.was, error.allowed, error.fix
            )
        except RequestFailed as error:
            logger.exception("request %r failed", ids[num_taken])
            answer = messages.Faulted(ids, str(error))
        for request_id in ids[:num_taken]:
            self._engine.abort(request_id)
        self._channel.send(answer)

    def _step(self) -> None:
        deltas = self._engine.step()
        if deltas:
            self._channel.send(messages.Deltas(tuple(deltas)))

    def _report(self) -> None:
        now = time.monotonic()
        if now < self._next_status:
            return
        self._next_status = now + STATUS_PERIOD_S
        self._channel.send(
            messages.Status(
                metrics=self._engine.metrics(),
                num_running=self._engine.num_running,
                num_waiting=self._engine.num_waiting,
                cut_off=self._engine.cut_off,
            )
        )


def main(arguments: Sequence[str]) -> int:
    """Serves one parent; returns the exit status."""
    address, parent = arguments
    leave_signals_to_parent()
    end_with_parent(int(parent))
    configure_logging()
    pulse, channel = Pulse(), Channel(address)
    signs = SignSender(lambda socket: socket.connect(messages.life_of(address)), pulse.message)
    try:
        _serve(channel, pulse)
    except UserError as error:
        if os.environ.get("PEGBOARD_RAISE") == "1":
            logger.exception("the engine cannot start")
        channel.send(messages.Failed(str(error), mistake=True))
        return 2
    except BaseException as error:
        logger.exception("the engine failed")
        channel.send(messages.Failed(f"{type(error).__name__}: {error}", mistake=False))
        return 1
    finally:
        signs.close()
        channel.close()
    return 0


def _serve(channel: Channel, pulse: Pulse) -> None:
    start = channel.receive()
    if isinstance(start, messages.Stop):
        return
    assert isinstance(start, messages.Start)
    started = time.monotonic()
    engine, prepared = _load(from_wire(start.prepared), channel, pulse)
    log_loaded(prepared, time.monotonic() - started)
    try:
        composition = prepared.composition
        # What was loaded stays: collections that walked it would hold up steps for milliseconds.
        gc.collect()
        gc.freeze()
        channel.send(messages.Ready(composition.max_model_len, composition.digest, os.getpid()))
        EngineLoop(engine, channel, pulse.life).run()
    finally:
        engine.close()


def _load(prepared: Prepared, channel: Channel, pulse: Pulse) -> tuple[EngineCore, Prepared]:
    """The running engine, and what it runs; loading is shown on a terminal and told to the server."""
    total = prepared.composition.num_parameters
    num_loaded = itertools.count(1)
    with progress_bar() as bar:
        task = bar.add_task("Loading weights", total=total)

        def advance(_name: str) -> None:
            bar.advance(task)
            channel.send(messages.Loading(next(num_loaded), total))

        starting = Starting(pulse.watch, lambda: channel.send(messages.Built()), advance)
        return start_engine(prepared, starting)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
