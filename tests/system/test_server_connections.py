"""Connections on which no request comes do not stay open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from pegboard.server.connection import BoundedConnection
from pegboard.testing.tiny import write_tiny_model

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
HALF_A_BODY = HALF_A_HEAD + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"


class Hasty(BoundedConnection):
    head_s = 0.3
    body_s = 0.6


async def seconds_open(url: httpx.URL, *sent: bytes, pause_s: float = 0.0) -> float:
    """How long a connection lasts, on which this is sent, a piece after each pause, and then nothing."""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    began = time.monotonic()
    answers = asyncio.create_task(reader.read())
    for piece in sent:
        writer.write(piece)
        await asyncio.wait({answers}, timeout=pause_s)
    async with asyncio.timeout(120):
        # A client that goes on writing to a closed connection is told so by a reset.
        await asyncio.wait({answers})
    writer.close()
    return time.monotonic() - began


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[httpx.URL, asyncio.Event]]:
    """A server of answers that come as soon as the body is there, or after a second, or never; the event
    is set when the client of one that never comes has left."""
    left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive()).get("more_body"):
            pass
        if scope["path"] == "/slow":
            await asyncio.sleep(1)
        if scope["path"] == "/endless":
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
            return
        if message["type"] != "http.disconnect":
            await PlainTextResponse("done")(scope, receive, send)

    config = uvicorn.Config(app, port=0, http=Hasty, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield httpx.URL(f"http://127.0.0.1:{port}"), left
    server.should_exit = True
    await serving


@pytest.mark.timing
@pytest.mark.parametrize(
    ("sent", "least"),
    [
        ((), 0.3),
        ((HALF_A_HEAD,), 0.3),
        # Another byte now and then does not help.
        (tuple(HALF_A_HEAD[i : i + 1] for i in range(len(HALF_A_HEAD))), 0.3),
        ((GET, HALF_A_HEAD), 0.4),
        ((HALF_A_BODY,), 0.6),
        ((HALF_A_BODY, *[b" "] * 50), 0.6),
        # In one piece, as pipelining clients send.
        ((GET + HALF_A_HEAD,), 0.3),
        ((GET + HALF_A_BODY,), 0.6),
    ],
)
def test_half_a_request_is_given_up(sent: tuple[bytes, ...], least: float) -> None:
    async def run() -> float:
        async with listening() as (url, _):
            return await seconds_open(url, *sent, pause_s=0.1)

    assert least - 0.05 < asyncio.run(run()) < 4


def test_what_has_come_takes_the_time_it_takes() -> None:
    """Neither an answer that is awaited nor a rest between requests is cut."""

    async def run() -> None:
        async with listening() as (url, _), httpx.AsyncClient(base_url=url) as client:
            for path in ("/slow", "/quick"):
                assert (await client.post(path, content=b"a")).text == "done"
                (connection,) = client._transport._pool.connections  # type: ignore[attr-defined]
                await asyncio.sleep(1)
                assert connection.is_idle() and not connection.has_expired()

    asyncio.run(run())


def test_what_is_no_http_is_refused_in_the_shape_of_the_api() -> None:
    async def run() -> bytes:
        async with listening() as (url, _):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(b"what?\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


POST = b"POST /quick HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "together"),
        (POST + b"Transfer-Encoding: Chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", "together"),
        (POST.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", "1.0"),
        (POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd", "Content-Length"),
        (POST + b"content-length: 3, 4\r\n\r\nabcd", "Content-Length"),
        (POST + b"content-length: -1\r\n\r\n", "Content-Length"),
        (POST + b"content-length: +1\r\n\r\na", "Content-Length"),
        (POST + b"content-length: 0x1\r\n\r\na", "Content-Length"),
        (POST + b"content-length: 1_0\r\n\r\na", "Content-Length"),
        (POST + b"content-length: " + b"9" * 40 + b"\r\n\r\na", "Content-Length"),
        (POST + b"content-length : 1\r\n\r\na", "header"),
        (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "Transfer-Encoding"),
        (POST + b"transfer-encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n", "Transfer-Encoding"),
        (CHUNKED + b"1\r\na\r\n" * 1200 + b"0\r\n\r\n", "few bytes"),
        (CHUNKED + (b"14\r\n" + b"a" * 20 + b"\r\n") * 1100 + b"0\r\n\r\n", "few bytes"),
        (CHUNKED + b"x\r\na\r\n0\r\n\r\n", "chunk"),
        (CHUNKED + b"-1\r\na\r\n0\r\n\r\n", "chunk"),
        (CHUNKED + b"0x1\r\na\r\n0\r\n\r\n", "chunk"),
        (CHUNKED + b"1\r\nab0\r\n\r\n", "chunk"),
        (CHUNKED + b"f" * 40 + b"\r\na", "chunk"),
        (b"GET /quick HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", "Host"),
        (b"GET /quick HTTP/1.1\r\n\r\n", "Host"),
    ],
)
def test_a_request_that_can_be_read_in_two_ways_is_refused(
    sent: bytes, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes after it on the connection are no request."""

    async def answer(url: httpx.URL, *pieces: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(url.host, url.port)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.05)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        return answer

    async def run() -> list[bytes]:
        async with listening() as (url, _):
            return [await answer(url, sent + GET), await answer(url, sent[:-1], sent[-1:] + GET)]

    for whole in asyncio.run(run()):
        head, _, body = whole.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close" in head.lower()
        error = json.loads(body)["error"]  # and nothing follows it
        assert complaint in error["message"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(("size", "count"), [(1, 1000), (20, 1000), (512, 3000), (10_000, 50)])
def test_a_body_in_chunks_of_some_bytes_is_read(size: int, count: int) -> None:
    chunk = f"{size:x}\r\n{'a' * size}\r\n".encode()

    async def run() -> bytes:
        async with listening() as (url, _):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(CHUNKED + chunk * count + b"0\r\n\r\n")
            async with asyncio.timeout(20):
                answer = await reader.readuntil(b"done")
            writer.close()
            return answer

    assert asyncio.run(run()).startswith(b"HTTP/1.1 200 ")


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAAA\r\n"


LATE = (b"", b"\n", b"\r\n", b"\r\n\r\n", b"x", GET, GET + HALF_A_BODY)


@pytest.mark.parametrize("headers", [b"", b"connection: close\r\n", UPGRADE])
def test_that_a_client_left_is_noticed_whatever_came_after_its_request(headers: bytes) -> None:
    head = b"POST /endless HTTP/1.1\r\nhost: x\r\n" + headers
    request = head + b"content-length: 1\r\n\r\na"

    async def run() -> None:
        async with listening() as (url, left):
            for late in LATE:
                for pieces in ((request + late,), (request, late)):
                    left.clear()
                    _, writer = await asyncio.open_connection(url.host, url.port)
                    for piece in pieces:
                        writer.write(piece)
                        await asyncio.sleep(0.05)
                    assert not left.is_set()
                    writer.close()
                    async with asyncio.timeout(5):
                        await left.wait()

    asyncio.run(run())


@pytest.mark.parametrize("late", [b"\r\n", b"\n", b"\r\n\r\n"])
@pytest.mark.parametrize("path", [b"/quick", pytest.param(b"/slow", marks=pytest.mark.slow)])
def test_an_empty_line_after_a_body_is_no_request(late: bytes, path: bytes) -> None:
    request = b"POST " + path + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\na" + late

    async def run() -> bytes:
        async with listening() as (url, _):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            answers = b""
            for _ in range(2):
                writer.write(request)
                answers += await reader.readuntil(b"done")
            writer.write(request + request.replace(b"\r\nhost", b"\r\nconnection: close\r\nhost"))
            async with asyncio.timeout(20):
                answers += await reader.read()
            writer.close()
            return answers

    answers = asyncio.run(run())
    assert answers.count(b"HTTP/1.1 200 ") == answers.count(b"HTTP/1.1") == 4


def test_what_comes_after_a_request_is_not_kept_without_end() -> None:
    async def run() -> None:
        async with listening() as (url, left):
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(20):
                with contextlib.suppress(ConnectionError):
                    while not left.is_set():
                        writer.write(b"x" * 2**14)
                        await writer.drain()
                        await asyncio.sleep(0.01)
                await left.wait()

    asyncio.run(run())


@pytest.mark.timing
@pytest.mark.slow
def test_the_server_gives_up_two_hundred_that_say_nothing(serve: Any, tmp_path: Path) -> None:
    served = serve(write_tiny_model(tmp_path, num_hidden_layers=1))
    server = psutil.Process(served.process.pid)
    url = httpx.URL(served.url)
    before = server.num_fds()

    async def run() -> list[float]:
        said = [(), (HALF_A_HEAD,)]
        visits = [seconds_open(url, *said[number % 2]) for number in range(200)]
        lasting = asyncio.gather(*visits)
        while server.num_fds() < before + 200:
            await asyncio.sleep(0.02)
        return await lasting

    assert all(9 < seconds < 30 for seconds in asyncio.run(run()))
    assert server.num_fds() <= before
    assert httpx.get(url.copy_with(path="/health")).status_code == 200
