"""Connections on which no request comes do not stay open."""

from __future__ import annotations

import asyncio
import json
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
async def listening() -> AsyncIterator[httpx.URL]:
    """A server of answers that come as soon as the body is there, or after half a second."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive()).get("more_body"):
            pass
        if scope["path"] == "/slow":
            await asyncio.sleep(1)
        if message["type"] != "http.disconnect":
            await PlainTextResponse("done")(scope, receive, send)

    config = uvicorn.Config(app, port=0, http=Hasty, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield httpx.URL(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
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
        async with listening() as url:
            return await seconds_open(url, *sent, pause_s=0.1)

    assert least - 0.05 < asyncio.run(run()) < 4


def test_what_has_come_takes_the_time_it_takes() -> None:
    """Neither an answer that is awaited nor a rest between requests is cut."""

    async def run() -> None:
        async with listening() as url, httpx.AsyncClient(base_url=url) as client:
            for path in ("/slow", "/quick"):
                assert (await client.post(path, content=b"a")).text == "done"
                (connection,) = client._transport._pool.connections  # type: ignore[attr-defined]
                await asyncio.sleep(1)
                assert connection.is_idle() and not connection.has_expired()

    asyncio.run(run())


def test_what_is_no_http_is_refused_in_the_shape_of_the_api() -> None:
    async def run() -> bytes:
        async with listening() as url:
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
