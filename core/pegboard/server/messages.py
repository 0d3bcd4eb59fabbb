"""The messages between the server's process and the engine's, msgpack over a private socket.

The server sends `Start` once, then `Add`, `Abort` and `Reset` at will, and `Stop` to end. The engine's
process answers `Built`, `Loading`, then `Ready` or `Failed`, then `Deltas`, `Refused`, `Faulted`, one
`ResetDone` for each `Reset` in order and, once a second, `Status`. On a second socket, at `life_of` the
first one's address, it sends `Alive` once a second from a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pegboard.engine.breaker import CutOff
from pegboard.errors import RequestError
from pegboard.interfaces.executor import Sign, WorkerHealth
from pegboard.request import Request, SequenceDelta


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Run the prepared engine, in the form of `pegboard.compose.to_wire`."""

    prepared: bytes


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Take these requests, all or none."""

    requests: tuple[Request, ...]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests; unknown ones are ignored."""

    request_ids: tuple[str, ...]


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Forget all prefixes of the cache."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Close the engine and end the process."""


ToEngine = Start | Add | Abort | Reset | Stop


class Built(msgspec.Struct, frozen=True, tag="built"):
    """All parts are made, and weights are loaded next."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """So many of the model's parameters are loaded."""

    num_loaded: int
    num_total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests.

    Attributes:
        max_model_len: most tokens of a sequence, prompt and answer together.
        digest: of the composition.
        pid: of the engine's process.
    """

    max_model_len: int
    digest: str
    pid: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The process is about to end.

    Attributes:
        line: the reason.
        mistake: whether it is the user's to mend (`UserError`) rather than a bug.
    """

    line: str
    mistake: bool


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    """The deltas of one step."""

    deltas: tuple[SequenceDelta, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """None of these requests was taken; the rest are the parts of a `RequestError`."""

    request_ids: tuple[str, ...]
    param: str | None
    was: str
    allowed: str
    fix: str

    def error(self) -> RequestError:
        return RequestError(self.param, self.was, allowed=self.allowed, fix=self.fix)


class Faulted(msgspec.Struct, frozen=True, tag="faulted"):
    """None of these requests was taken, by a fault that is not their sender's."""

    request_ids: tuple[str, ...]
    line: str


class ResetDone(msgspec.Struct, frozen=True, tag="reset_done"):
    """No request can begin with KV that was computed before."""


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The engine's metrics in Prometheus text format, its sequences, and the plugins that it does
    without for now."""

    metrics: str
    num_running: int
    num_waiting: int
    cut_off: tuple[CutOff, ...] = ()


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The engine's process lives.

    Attributes:
        sign: what it is doing.
        worst_step_s: seconds of its longest step that has ended.
        workers: how the workers' processes are.
    """

    sign: Sign
    worst_step_s: float
    workers: tuple[WorkerHealth, ...] = ()


FromEngine = Built | Loading | Ready | Failed | Deltas | Refused | Faulted | ResetDone | Status

encode: Callable[[ToEngine | FromEngine | Alive], bytes] = msgspec.msgpack.Encoder().encode
"""The wire form of a message."""

decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode
decode_alive: Callable[[bytes], Alive] = msgspec.msgpack.Decoder(Alive).decode
"""Each raises msgspec.ValidationError when the bytes are no such message."""


def life_of(address: str) -> str:
    """The address for signs of life, beside that of all other messages."""
    return f"{address}-life"
