"""Signs of life."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from pegboard import life
from pegboard.life import SignSender


def test_a_sign_that_cannot_be_made_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "PERIOD_S", 0.01)

    def messages() -> Iterator[bytes | SystemExit]:
        yield b"first"
        yield SystemExit(3)
        while True:
            yield b"later"

    left = messages()

    def message() -> bytes:
        made = next(left)
        if isinstance(made, SystemExit):
            raise made
        return made

    with zmq.Context() as context, context.socket(zmq.PULL) as receiver:
        receiver.rcvtimeo = 20_000
        port = receiver.bind_to_random_port("tcp://127.0.0.1")
        signs = SignSender(lambda socket: socket.connect(f"tcp://127.0.0.1:{port}"), message)
        assert [receiver.recv(), receiver.recv()] == [b"first", b"later"]
        signs.close()


def test_what_cannot_be_connected_is_raised() -> None:
    with pytest.raises(zmq.ZMQError):
        SignSender(lambda socket: socket.connect("nowhere"), lambda: b"")
