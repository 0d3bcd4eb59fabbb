"""One request and its streamed answer, with the time of each chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import msgspec

COMPLETIONS = "/v1/completions"

Clock = Callable[[], float]
"""Seconds since the load began."""


@dataclass(frozen=True)
class Failure:
    """The reason for a missing or incomplete answer.

    Attributes:
        kind: by which failures are counted: `HTTP 503`, `timeout`, `stream cut off`.
        message: the server's or the client's.
    """

    kind: str
    message: str


@dataclass
class Record:
    """A request, filled in as its answer comes. Times are seconds since the load began.

    Attributes:
        body: what is sent.
        num_asked: output tokens asked for.
        scheduled: when it was to be sent; latencies count from here.
        sent, ended: when it was, and when its answer was over; None: not yet, or never.
        chunks: arrival of each chunk that brought text or tokens, and how many tokens; None: not said.
        num_input_tokens, num_output_tokens: as the server counts them; None: it does not.
        state: `unsent` and `open` remain where the run was interrupted.
    """

    body: bytes
    num_asked: int
    scheduled: float = 0.0
    sent: float | None = None
    ended: float | None = None
    chunks: list[tuple[float, int | None]] = field(default_factory=list)
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    state: Literal["unsent", "open", "completed", "failed"] = "unsent"
    failure: Failure | None = None

    def fail(self, kind: str, message: str) -> None:
        self.state, self.failure = "failed", Failure(kind, " ".join(message.split())[:500])


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


async def exchange(http: httpx.AsyncClient, record: Record, clock: Clock, timeout_s: float) -> None:
    """Sends the request, and fills in the record until the answer ends, well or not."""
    record.sent, record.state = clock(), "open"
    try:
        async with (
            asyncio.timeout(timeout_s),
            http.stream("POST", COMPLETIONS, content=record.body) as response,
        ):
            if response.status_code == httpx.codes.OK:
                await _read_stream(response, record, clock)
            else:
                message = error_message(await response.aread())
                record.fail(f"HTTP {response.status_code}", message)
    except TimeoutError:
        record.fail("timeout", f"no whole answer within {timeout_s:g} s")
    except httpx.ConnectError as error:
        record.fail("no connection", str(error))
    except httpx.HTTPError as error:
        record.fail("connection lost", f"{type(error).__name__}: {error}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        record.fail("malformed stream", str(error))
    record.ended = clock()


async def _read_stream(response: httpx.Response, record: Record, clock: Clock) -> None:
    finished = False
    async for now, event in _events(response, clock):
        if event == b"[DONE]":
            finished = True
            continue
        chunk = msgspec.json.decode(event, type=_Chunk)
        if chunk.error is not None:
            record.fail("error in the stream", _said(chunk.error))
            return
        finished |= _take(chunk, record, now)
    if not finished:
        record.fail("stream cut off", "it ended without a finish reason")
    elif not record.chunks:
        record.fail("no tokens", "the stream brought none")
    else:
        record.state = "completed"


def _take(chunk: _Chunk, record: Record, now: float) -> bool:
    """Adds a chunk to the record; returns whether it is the last with tokens."""
    if chunk.usage is not None:
        record.num_input_tokens = chunk.usage.prompt_tokens
        record.num_output_tokens = chunk.usage.completion_tokens
    for choice in chunk.choices:
        count = None if choice.token_ids is None else len(choice.token_ids)
        if count or (count is None and choice.text):
            record.chunks.append((now, count))
    return any(choice.finish_reason is not None for choice in chunk.choices)


async def _events(response: httpx.Response, clock: Clock) -> AsyncIterator[tuple[float, bytes]]:
    """The data of server-sent events, of which each is one line, and when each was complete."""
    rest = b""
    async for data in response.aiter_bytes():
        now = clock()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[5:].strip()


def error_message(body: bytes) -> str:
    """The message in the body of an error."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:500].decode(errors="replace")
    return _said(decoded.get("error", decoded) if isinstance(decoded, dict) else decoded)


def _said(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
