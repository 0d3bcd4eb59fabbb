"""The messages of an executor and a worker's process.

The process is started by `WorkerProgram.argv`. The first line of its standard input is a `Connection` as
JSON; the input then stays open, and when it closes the process ends.

It connects three ZeroMQ sockets: a PULL socket to `Connection.requests`, and to `Connection.answers` a PUSH
socket for answers and another, of a thread of its own, for an `Alive` every second. A message is one frame
of msgpack. The process says `Hello` first. Then each request gets one `Done` or `Failed`, in order; what
raised ends nothing. While it answers `Start` it tells `Built` once and `Loaded` for each parameter.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pegboard.interfaces.executor import Sign


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses and keys by which a worker's process reaches its executor. Keys are CURVE's, in Z85.

    Attributes:
        requests, answers: addresses to connect to.
        executor_key: the executor's public key.
        public_key, secret_key: the worker's.
        parent: id of the process that starts this one directly, for the system to end it with that one;
            None: it is started by another, perhaps on another machine.
    """

    requests: str
    answers: str
    executor_key: str
    public_key: str
    secret_key: str
    parent: int | None = None


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Build a worker and load its weights; see `WorkerProgram`. Answered by None."""

    composition: bytes
    digest: str


class Execute(msgspec.Struct, frozen=True, tag="execute"):
    """Run a step: `pegboard.step.encode` of a StepBatch. Answered by that of the StepResult."""

    batch: bytes


class Call(msgspec.Struct, frozen=True, tag="call"):
    """`Worker.call`. Answered by what it returns."""

    method: str
    arguments: list[Any]


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Close the worker and end the process. Answered by None."""


ToWorker = Start | Execute | Call | Close


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The process takes requests."""

    rank: int


class Built(msgspec.Struct, frozen=True, tag="built"):
    """All parts are made, and weights are loaded next."""

    rank: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A parameter is loaded."""

    rank: int
    name: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The answer to the oldest open request."""

    rank: int
    value: Any = None


class UnusableKernel(msgspec.Struct, frozen=True):
    """The arguments of a `pegboard.errors.KernelUnusable`."""

    operation: str
    family: str
    reason: str
    named: bool


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The oldest open request raised.

    Attributes:
        line: what.
        mistake: whether it is the user's to mend (`UserError`) rather than a bug.
        kernel: set where a kernel failed its self-test.
    """

    rank: int
    line: str
    mistake: bool = False
    kernel: UnusableKernel | None = None


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """A sign of life, sent every second."""

    rank: int
    sign: Sign


FromWorker = Hello | Built | Loaded | Done | Failed | Alive
