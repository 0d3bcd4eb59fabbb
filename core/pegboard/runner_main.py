"""`python -m pegboard.runner_main COMPOSITION.json RANK SOCKET`: a worker process.

It builds its worker from the composition, connects to the Unix socket and serves one peer until that
closes. A frame is a little-endian 4-byte length and that many bytes of msgpack: [kind, payload].

The worker's first frame is ["hello", digest of its composition]; the peer compares it before anything
is loaded. Then each frame of the peer gets one answer, in order:

    ["start"]                   -> ["ok", nil]
    ["execute", StepBatch]      -> ["ok", StepResult]      (bytes of `step.encode`)
    ["call", method, ...]       -> ["ok", value]           (after the method, its arguments)
    ["close"]                   -> ["ok", nil], and the process ends

What raised is answered by ["error", line]; the process lives on.
"""

from __future__ import annotations

import argparse
import logging
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pegboard import step
from pegboard.errors import EngineError, PegboardError
from pegboard.interfaces.executor import Worker

_LENGTH = struct.Struct("<I")

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves a worker over a socket; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pegboard.runner_main")
    parser.add_argument("composition", type=Path, help="the frozen composition, as JSON")
    parser.add_argument("rank", type=int, help="the worker's rank")
    parser.add_argument("socket", help="path of the Unix socket to connect to")
    args = parser.parse_args(argv)
    # Late, so that `--help` needs no torch.
    from pegboard.compose import load_worker

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(args.socket)
        digest, worker = load_worker(args.composition, args.rank)
        try:
            send_frame(peer, ["hello", digest])
            serve(peer, worker)
        finally:
            worker.close()
    return 0


def serve(peer: socket.socket, worker: Worker) -> None:
    """Answers frames until the peer asks to close, or is gone."""
    while (frame := receive_frame(peer)) is not None:
        try:
            answer = ["ok", _answer(worker, frame)]
        except PegboardError as error:
            answer = ["error", str(error)]
        except Exception as error:
            _log.exception("worker failed")
            answer = ["error", " ".join(f"{type(error).__name__}: {error}".split())]
        send_frame(peer, answer)
        if frame[:1] == ["close"]:
            return


def send_frame(peer: socket.socket, message: Sequence[Any]) -> None:
    """Sends one frame."""
    data = msgspec.msgpack.encode(message)
    peer.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(peer: socket.socket) -> list[Any] | None:
    """The next frame; None when the peer has closed between two frames.

    Raises:
        EngineError: the peer closed within a frame.
        msgspec.ValidationError: the frame is not a list.
    """
    header = _receive(peer, _LENGTH.size)
    if header is None:
        return None
    data = _receive(peer, _LENGTH.unpack(header)[0])
    if data is None:
        raise EngineError("the peer closed its socket within a frame")
    return msgspec.msgpack.decode(data, type=list[Any])


def _receive(peer: socket.socket, num_bytes: int) -> bytes | None:
    """Exactly so many bytes; None when the peer closed before the first."""
    parts = bytearray()
    while len(parts) < num_bytes:
        part = peer.recv(min(num_bytes - len(parts), 2**20))
        if not part:
            if parts:
                raise EngineError("the peer closed its socket within a frame")
            return None
        parts += part
    return bytes(parts)


def _answer(worker: Worker, frame: list[Any]) -> Any:
    match frame:
        case ["start"]:
            worker.start()
            return None
        case ["execute", bytes(data)]:
            return step.encode(worker.execute(step.decode(data, step.StepBatch)))
        case ["call", str(method), *arguments]:
            return worker.call(method, *arguments)
        case ["close"]:
            worker.close()
            return None
    raise EngineError(f"worker: unknown request {frame[:1]}; allowed: start, execute, call, close")


if __name__ == "__main__":
    raise SystemExit(main())
