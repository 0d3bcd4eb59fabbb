"""How much is kept of requests: bytes until they have been read, and nothing once they are answered."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from pegboard.server.connection import BoundedConnection
from pegboard.server.middleware import HttpMetrics, LimitBody, WatchRequests


@pytest.mark.parametrize("reads_on", [True, False])
def test_bodies_count_together_until_they_have_been_read(reads_on: bool) -> None:
    """A route that waits for its client to leave has read the body; one that works on it has not."""

    async def run() -> list[Any]:
        over = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive()).get("more_body"):
                pass
            await (receive() if reads_on else over.wait())

        limit = LimitBody(app, max_bytes=10, max_together=25)

        async def ask() -> None:
            messages = iter(
                {"type": "http.request", "body": bytes(5), "more_body": more_body}
                for more_body in (True, False)
            )

            async def receive() -> Message:
                for message in messages:
                    return message
                await over.wait()
                return {"type": "http.disconnect"}

            await limit({"type": "http", "headers": []}, receive, _nowhere)

        asking = [asyncio.create_task(ask()) for _ in range(8)]
        await asyncio.sleep(0.01)
        over.set()
        ended = await asyncio.gather(*asking, return_exceptions=True)
        await ask()  # all have been given back
        return ended

    refused = [end for end in asyncio.run(run()) if end is not None]
    assert all(isinstance(end, HTTPException) and end.status_code == 503 for end in refused)
    assert len(refused) == (0 if reads_on else 6)


async def _nowhere(message: Message) -> None:
    raise AssertionError(message)


class Submitted:
    """Stands for a request's prompts."""


def test_a_connection_at_rest_holds_nothing_of_its_last_request() -> None:
    alive: weakref.WeakSet[Submitted] = weakref.WeakSet()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["submission"] = submission = Submitted()
        alive.add(submission)
        await PlainTextResponse("done")(scope, receive, send)

    async def run() -> None:
        watched = WatchRequests(app, HttpMetrics(CollectorRegistry()), None)
        http: Any = BoundedConnection
        server = uvicorn.Server(
            uvicorn.Config(watched, port=0, http=http, lifespan="off", log_config=None)
        )
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/")).text == "done"
            await asyncio.sleep(0)
            gc.collect()
            assert not alive
            (connection,) = client._transport._pool.connections  # type: ignore[attr-defined]
            assert connection.is_idle() and not connection.has_expired()
        server.should_exit = True
        await serving

    asyncio.run(run())
