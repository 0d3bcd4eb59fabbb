"""HTTP connections that cannot be held for ever, and whose refusals have the API's shape."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar, cast

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from pegboard.server.failures import ApiError, shown
from pegboard.server.places import Places
from pegboard.server.request_log import RequestLog
from pegboard.server.strict_http import StrictHttp

MAX_READ_BYTES = 32 * 1024
"""Bytes that are read of one connection before others have their turn."""

MAX_LATE_BYTES = 64 * 1024
"""Bytes that may arrive after a request while it is answered."""


class BoundedConnection(H11Protocol):
    """uvicorn's connection, closed when a request is late or its place is needed.

    uvicorn itself closes only connections that rest between requests. A client that sends nothing, or
    stops within a head or a body, would hold a file descriptor for as long as it likes. And while
    uvicorn answers, it stops reading as soon as more bytes arrive (an empty line, the next request);
    then it does not notice that the client has left.

    Args:
        places: of all connections; None: as many as come.
        log: of bytes that are no HTTP; None: they are not logged.

    Attributes:
        head_s: from a connection's opening, or a head's first byte, to the head's end.
        body_s: from there to the body's end.
    """

    head_s: ClassVar[float] = 10.0
    body_s: ClassVar[float] = 60.0

    def __init__(
        self,
        *args: Any,
        places: Places | None = None,
        log: RequestLog | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.conn: StrictHttp = StrictHttp(self.config.h11_max_incomplete_event_size)
        self._places = places
        self._log = log
        self._awaited: type[h11.IDLE] | type[h11.SEND_BODY] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        cast(Any, transport).max_size = MAX_READ_BYTES
        if self._places is not None and not self._places.take(self):
            most = f"{self._places.max_connections} connections"
            return self._refuse(ApiError(503, f"the server is busy with {most}"))
        self._await(h11.IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._await(None)
        if self._places is not None:
            self._places.leave(self)

    def data_received(self, data: bytes) -> None:
        # After a request that is the connection's last, nothing counts.
        if self.conn.their_state not in (h11.MUST_CLOSE, h11.CLOSED):
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.transport.is_closing():
            return
        if self.conn.is_whole:
            if len(self.conn.trailing_data[0]) > MAX_LATE_BYTES:
                return self.transport.abort()
            self.flow.resume_reading()
        self._set_clock()
        self._tell_places()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._tell_places()

    def give_way(self) -> bool:
        """Closes the connection, which is idle; False: its last answer is not read yet."""
        if self.transport.get_write_buffer_size():
            return False
        self.transport.close()
        return True

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP."""
        if self.cycle is not None and not self.cycle.response_complete:
            # Who answers the request whose body this was hears that it is over.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return self.transport.close()
        complaint = shown(self.conn.complaint or msg)
        error = ApiError(400, f"the request is no valid HTTP: {complaint}")
        if self._log is not None:
            self._log.refused(error.status, self.client, str(error))
        self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        body = msgspec.json.encode(error.body())
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            *error.headers.items(),
        ]
        reason = HTTPStatus(error.status).phrase.encode()
        response = h11.Response(status_code=error.status, headers=headers, reason=reason)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _set_clock(self) -> None:
        """Starts the clock of the client's next bytes."""
        if self.conn.their_state is h11.SEND_BODY:
            return self._await(h11.SEND_BODY)
        if self.conn.their_state is not h11.IDLE:
            return self._await(None)
        if self.cycle is None or self.conn.trailing_data[0]:
            return self._await(h11.IDLE)
        self._await(None)
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _tell_places(self) -> None:
        if self._places is None:
            return
        if self.cycle is None or self.cycle.response_complete:
            self._places.rest(self)
        else:
            self._places.work(self)

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
