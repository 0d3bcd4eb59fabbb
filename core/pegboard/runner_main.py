"""`python -m pegboard.runner_main RANK`: a worker's process; see `interfaces.worker_process`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import msgspec
import zmq

from pegboard import step
from pegboard.errors import (
    INTERRUPTS,
    EngineError,
    KernelUnusable,
    PegboardError,
    UserError,
    described,
)
from pegboard.interfaces.executor import Worker
from pegboard.interfaces.worker_process import (
    Alive,
    Built,
    Call,
    Close,
    Connection,
    Done,
    Execute,
    Failed,
    FromWorker,
    Hello,
    Loaded,
    Start,
    ToWorker,
    UnusableKernel,
)
from pegboard.life import Life, SignSender
from pegboard.lifeline import die_with_parent, end_with_input, leave_signals_to_parent
from pegboard.logs import configure_logging

FLUSH_MS = 2000
"""How long the last answer may take to leave."""

StartWorker = Callable[[bytes, str, int, Callable[[], None], Callable[[str], None]], Worker]
"""As `pegboard.compose.start_worker`: of (composition, digest, rank, on_built, on_tensor)."""

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves one executor; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pegboard.runner_main")
    parser.add_argument("rank", type=int, help="the worker's rank")
    parser.add_argument(
        "--start", default="pegboard.compose:start_worker", help="module:function that starts it"
    )
    args = parser.parse_args(argv)
    leave_signals_to_parent()
    # Unbuffered: the lifeline reads the same input.
    with open(0, "rb", buffering=0, closefd=False) as given:
        connection = msgspec.json.decode(given.readline(), type=Connection)
    if connection.parent is not None:
        die_with_parent(connection.parent)
    end_with_input()
    configure_logging(logging.WARNING)
    with zmq.Context() as context:
        _serve(args.rank, args.start, connection, context)
    return 0


def _serve(
    rank: int, start: str, connection: Connection, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    def connect(socket: zmq.Socket[bytes], address: str) -> None:
        socket.curve_serverkey = connection.executor_key.encode()
        socket.curve_publickey = connection.public_key.encode()
        socket.curve_secretkey = connection.secret_key.encode()
        socket.connect(address)

    life = Life()
    with context.socket(zmq.PULL) as requests, context.socket(zmq.PUSH) as answers:
        for socket in (requests, answers):
            socket.set_hwm(0)
            socket.linger = FLUSH_MS
        connect(requests, connection.requests)
        connect(answers, connection.answers)
        signs = SignSender(
            lambda socket: connect(socket, connection.answers),
            lambda: _encode(Alive(rank, life.sign())),
        )

        def send(message: FromWorker) -> None:
            answers.send(_encode(message))

        try:
            _Desk(rank, start, send, life).serve(requests)
        finally:
            signs.close()


@dataclass
class _Desk:
    """Answers one request after the other."""

    rank: int
    start: str
    send: Callable[[FromWorker], None]
    life: Life
    worker: Worker | None = None

    def serve(self, requests: zmq.Socket[bytes]) -> None:
        self.send(Hello(self.rank))
        while not isinstance(request := _decode(requests.recv()), Close):
            self._answer(request)
        if self.worker is not None:
            self.worker.close()
        self.send(Done(self.rank))

    def _answer(self, request: ToWorker) -> None:
        try:
            self.send(Done(self.rank, self._do(request)))
        except INTERRUPTS:
            raise
        except BaseException as error:  # a plugin that calls sys.exit has failed too
            if not isinstance(error, PegboardError):
                _log.exception("worker %d failed", self.rank)
            self.send(_failed(self.rank, error))

    def _do(self, request: ToWorker) -> Any:
        match request:
            case Start(composition=composition, digest=digest):
                # Late: what is imported for it takes seconds, in which signs of life are sent already.
                module, _, name = self.start.partition(":")
                start: StartWorker = getattr(import_module(module), name)
                self.worker = start(
                    composition,
                    digest,
                    self.rank,
                    lambda: self.send(Built(self.rank)),
                    lambda tensor: self.send(Loaded(self.rank, tensor)),
                )
                self.life.rest()
            case Execute(batch=data):
                batch = step.decode(data, step.StepBatch)
                with self.life.step(batch.step_id):
                    return step.encode(self._started().execute(batch))
            case Call(method=method, arguments=arguments):
                return self._started().call(method, *arguments)
        return None

    def _started(self) -> Worker:
        if self.worker is None:
            raise EngineError(f"worker {self.rank} has not started")
        return self.worker


def _failed(rank: int, error: BaseException) -> Failed:
    if isinstance(error, KernelUnusable):
        kernel = UnusableKernel(error.operation, error.family, error.reason, error.named)
        return Failed(rank=rank, line=str(error), kernel=kernel)
    line = str(error) if isinstance(error, PegboardError) else described(error)
    return Failed(rank=rank, line=line, mistake=isinstance(error, UserError))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ToWorker).decode


if __name__ == "__main__":
    raise SystemExit(main())
