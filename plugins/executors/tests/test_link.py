"""The sockets of an executor: only holders of the run's keys are heard."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import zmq

from pegboard.interfaces.worker_process import Close, Connection, Hello
from pegboard_executors.link import Link


@pytest.fixture(params=[None, "127.0.0.1"], ids=["socket", "tcp"])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    link = Link(1, request.param)
    yield link
    link.close()


def _say_hello(
    connection: Connection, context: zmq.Context[zmq.Socket[bytes]]
) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    # A stranger's message is taken by nobody: the end of the context must not wait for that.
    socket.linger = 0
    if connection.secret_key:
        socket.curve_serverkey = connection.executor_key.encode()
        socket.curve_publickey = connection.public_key.encode()
        socket.curve_secretkey = connection.secret_key.encode()
    socket.connect(connection.answers)
    socket.send(msgspec.msgpack.encode(Hello(0)))
    return socket


def test_only_who_has_the_keys_is_heard(link: Link) -> None:
    own = link.connection(0, parent=None)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    with zmq.Context() as context:
        strangers = (
            msgspec.structs.replace(own, secret_key=""),
            msgspec.structs.replace(own, public_key=public, secret_key=secret),
            msgspec.structs.replace(own, executor_key=public, public_key=public, secret_key=secret),
        )
        sockets = [_say_hello(stranger, context) for stranger in strangers]
        assert link.receive(0.5) == []
        sockets.append(_say_hello(own, context))
        assert link.receive(10) == [Hello(0)]
        for socket in sockets:
            socket.close()


def test_what_is_sent_to_nobody_is_not_kept(link: Link) -> None:
    assert not link.is_connected(0, 0)
    assert not link.send(0, Close())
