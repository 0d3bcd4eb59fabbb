"""The sockets between an executor and its workers."""

from __future__ import annotations

import secrets
import sys

import msgspec
import zmq
import zmq.auth.thread

from pegboard.interfaces.worker_process import Connection, FromWorker, ToWorker

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromWorker).decode


class Link:
    """One socket for each worker's requests, and one for the answers of all.

    Both ends have keys that are made for the run and leave this process by the workers' standard input
    alone; others are not heard. On Linux, workers of this machine are reached by sockets
    without a file.

    Args:
        num_workers: how many there are.
        host: address of this machine for workers on others; None: they run on this one.

    Raises:
        zmq.ZMQError: nothing can listen there.
    """

    def __init__(self, num_workers: int, host: str | None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._host = host
        self._executor_key, self._executor_secret = zmq.curve_keypair()
        self._workers_key, self._workers_secret = zmq.curve_keypair()
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.configure_curve_callback(credentials_provider=self)
        self._authenticator.start()
        try:
            self._answers, self._answers_address = self._bound(zmq.PULL)
            self._requests = [self._bound(zmq.PUSH) for _ in range(num_workers)]
        except BaseException:
            self.close()
            raise

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of a public key may connect; the authenticator asks."""
        return key == self._workers_key

    def connection(self, rank: int, parent: int | None) -> Connection:
        """The addresses and keys by which a worker's process connects."""
        return Connection(
            requests=self._requests[rank][1],
            answers=self._answers_address,
            executor_key=self._executor_key.decode(),
            public_key=self._workers_key.decode(),
            secret_key=self._workers_secret.decode(),
            parent=parent,
        )

    def is_connected(self, rank: int, timeout_s: float) -> bool:
        """Whether a worker has connected, within a time."""
        return bool(self._requests[rank][0].poll(round(timeout_s * 1000), zmq.POLLOUT))

    def send(self, rank: int, request: ToWorker) -> bool:
        """Gives a request to a worker, or to the system for it; False: it is not connected."""
        try:
            self._requests[rank][0].send(_encode(request), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_s: float) -> list[FromWorker]:
        """The messages that have come, waiting for the first of them."""
        messages: list[FromWorker] = []
        if self._answers.poll(round(timeout_s * 1000)):
            while self._answers.poll(0):
                messages.append(_decode(self._answers.recv()))
        return messages

    def close(self) -> None:
        """Drops what was not sent."""
        self._authenticator.stop()
        self._context.destroy(linger=0)

    def _bound(self, kind: int) -> tuple[zmq.Socket[bytes], str]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.curve_server = True
        socket.curve_publickey = self._executor_key
        socket.curve_secretkey = self._executor_secret
        if self._host is None and sys.platform == "linux":
            socket.bind(f"ipc://@pegboard-{secrets.token_hex(16)}")
        else:
            socket.bind(f"tcp://{self._host or '127.0.0.1'}:*")
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
