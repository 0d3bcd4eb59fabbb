"""HTTP as h11 reads it, less all messages that two readers could read in two ways."""

from __future__ import annotations

from typing import Any

import h11
from h11._state import MIGHT_SWITCH_PROTOCOL

MAX_HEAD_BYTES = 16 * 1024

MAX_SMALL_CHUNKS = 1024
MIN_CHUNK_BYTES = 512
"""So many chunks of a body may be of any size; beyond these they hold so many bytes on average. Each takes
as long to read as some ten thousand bytes."""


class StrictHttp(h11.Connection):
    """The server's side of a connection.

    Attributes:
        complaint: the fault of the client's message.
    """

    complaint = ""

    def __init__(self, max_head_bytes: int | None) -> None:
        super().__init__(h11.SERVER, max_head_bytes or MAX_HEAD_BYTES)
        self._num_chunks = 0
        self._num_bytes = 0

    @property
    def is_whole(self) -> bool:
        """Whether a request has come to its end, and its answer has not."""
        # A client that offers another protocol waits for an answer to the offer.
        return self.their_state in (h11.DONE, MIGHT_SWITCH_PROTOCOL)

    def next_event(self) -> Any:
        """See h11.

        Raises:
            h11.RemoteProtocolError: the message is no HTTP, or states its length in two ways, or comes
                in too small pieces.
        """
        if self.their_state is h11.IDLE:
            self._skip_empty_lines()
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                _check_framing(event)
                self._num_chunks = self._num_bytes = 0
            elif isinstance(event, h11.Data):
                self._count(event)
        except h11.RemoteProtocolError as error:
            self.complaint = str(error)
            raise
        return event

    def _count(self, data: h11.Data) -> None:
        self._num_chunks += data.chunk_start
        self._num_bytes += len(data.data)
        if self._num_chunks > MAX_SMALL_CHUNKS + self._num_bytes // MIN_CHUNK_BYTES:
            raise h11.RemoteProtocolError(
                f"{self._num_chunks} chunks of a few bytes each; allowed: {MAX_SMALL_CHUNKS}, and "
                f"one more for every {MIN_CHUNK_BYTES} bytes"
            )

    def _skip_empty_lines(self) -> None:
        """Some clients end a body with a line that its length does not count (RFC 9112, 2.2)."""
        waiting = self.trailing_data[0]
        num_empty = len(waiting) - len(waiting.lstrip(b"\r\n"))
        if num_empty:
            self._receive_buffer.maybe_extract_at_most(num_empty)


def _check_framing(request: h11.Request) -> None:
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" not in names:
        return
    # A proxy in front may see the end elsewhere, and take the rest for another request.
    if b"content-length" in names:
        raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding together")
    if request.http_version < b"1.1":
        raise h11.RemoteProtocolError("Transfer-Encoding in HTTP/1.0")
