"""HTTP connections that cannot be held for ever, and whose refusals have the API's shape."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from pegboard.server.failures import ApiError


class BoundedConnection(H11Protocol):
    """uvicorn's connection, closed when a request is not there in time.

    uvicorn closes a connection that rests between requests. One that never said anything, or that
    stopped in a request's head or body, would hold a file descriptor for as long as its client likes.

    Attributes:
        head_s: from a connection's opening, or a head's first byte, to the head's end.
        body_s: from there to the body's end.
    """

    head_s: ClassVar[float] = 10.0
    body_s: ClassVar[float] = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._awaited: type[h11.IDLE] | type[h11.SEND_BODY] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await(h11.IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._await(None)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is h11.SEND_BODY:
            self._await(h11.SEND_BODY)
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await(h11.IDLE)
        else:
            self._await(None)

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP."""
        body = msgspec.json.encode(ApiError(400, msg).body())
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await(self, part: type[h11.IDLE] | type[h11.SEND_BODY] | None) -> None:
        """Starts the clock of a part of a request, unless it runs; None stops it."""
        if part is self._awaited:
            return
        self._awaited = part
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if part is not None:
            seconds = self.head_s if part is h11.IDLE else self.body_s
            self._deadline = self.loop.call_later(seconds, self.transport.close)
