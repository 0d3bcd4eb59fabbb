"""Server-sent events, and the watch for clients that go away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from pegboard.errors import PegboardError
from pegboard.server.failures import as_api_error
from pegboard.server.replies import Chunk
from pegboard.server.submission import Submission

T = TypeVar("T")

STALL_S = 30.0
"""Seconds without a read by the client after which its stream is given up."""

_LINE_ENDS = [(end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\u0085\u2028\u2029"]
"""JSON need not escape them, but clients that cut events into lines by Unicode's rules end lines there."""

logger = logging.getLogger("pegboard.server")


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


async def while_connected(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; the work is cancelled when the client goes.

    Raises:
        ClientGone: it went.
    """
    answer = asyncio.ensure_future(work)
    departure = asyncio.ensure_future(_departure(http))
    try:
        await asyncio.wait({answer, departure}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ClientGone
    finally:
        answer.cancel()
        departure.cancel()


class EventStream(StreamingResponse):
    """The chunks of a call as events. The submission is closed however the response ends."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[Chunk], submission: Submission) -> None:
        super().__init__(_events(chunks), headers={"cache-control": "no-cache"})
        self._submission = submission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALL_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            # The answer stays incomplete, and the connection is closed for it.
            logger.warning("a client read nothing for %g s; its stream was given up", STALL_S)
        finally:
            self._submission.close()


async def _events(chunks: AsyncIterator[Chunk]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except Exception as error:
        # The status line has been sent. Clients take a stream that merely ends for a whole answer,
        # so the error is an event of its own.
        if not isinstance(error, PegboardError):
            logger.exception("a stream failed")
        yield _event(as_api_error(error).body())
    yield b"data: [DONE]\n\n"


def _event(payload: msgspec.Struct) -> bytes:
    data = msgspec.json.encode(payload)
    for character, escape in _LINE_ENDS:
        data = data.replace(character, escape)
    return b"data: " + data + b"\n\n"


async def _departure(http: Request) -> None:
    # The body has been read, so all that is left to receive is the end of the connection.
    while (await http.receive())["type"] != "http.disconnect":
        pass
