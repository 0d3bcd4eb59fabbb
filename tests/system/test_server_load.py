"""Many clients at once get whole answers, or are told why not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.testing.tiny import write_tiny_model

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(
        folder, tokenizer=True, num_hidden_layers=1, max_position_embeddings=20_000
    )


def body(max_tokens: int, **more: Any) -> dict[str, Any]:
    endless = {"ignore_eos": True, "return_token_ids": True, "stream": True}
    return {"prompt": [5, 6, 7], "max_tokens": max_tokens, **endless, **more}


async def chunks(client: httpx.AsyncClient, url: str, **fields: Any) -> AsyncIterator[Any]:
    """The events of a stream, as JSON; the last one is the text `[DONE]`."""
    async with client.stream("POST", f"{url}/v1/completions", json=body(**fields)) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)


class Streams:
    """Streams that are read to their ends, each by a task."""

    def __init__(self, url: str, count: int, max_tokens: int) -> None:
        self.num_begun = 0
        self._client = httpx.AsyncClient(limits=LIMITS, timeout=120)
        self.tasks = [asyncio.create_task(self._read(url, max_tokens)) for _ in range(count)]

    async def all_begun(self) -> None:
        while self.num_begun < len(self.tasks):
            for task in self.tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.02)

    async def results(self) -> list[list[Any]]:
        found = await asyncio.gather(*self.tasks)
        await self._client.aclose()
        return found

    async def _read(self, url: str, max_tokens: int) -> list[Any]:
        events: list[Any] = []
        async for event in chunks(self._client, url, max_tokens=max_tokens):
            self.num_begun += not events
            events.append(event)
        return events


def family(served: Any) -> list[psutil.Process]:
    """The server's children."""
    return psutil.Process(served.process.pid).children(recursive=True)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until a condition held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s
        time.sleep(0.05)
    return time.monotonic() - began


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_a_drain_completes_all_open_streams(serve: Any, model: Path) -> None:
    served = serve(model)
    children = family(served)

    async def run() -> list[list[Any]]:
        streams = Streams(served.url, 32, max_tokens=60)
        await streams.all_begun()
        # A terminal or a service manager signals the engine's process as well.
        os.kill(served.engine_pid, signal.SIGINT)
        os.kill(served.engine_pid, signal.SIGTERM)
        served.process.send_signal(signal.SIGTERM)
        return await streams.results()

    for events in asyncio.run(run()):
        assert events[-1] == "[DONE]"
        choices = [event["choices"][0] for event in events[:-1]]
        assert choices[-1]["finish_reason"] == "length"
        assert sum(len(choice["token_ids"]) for choice in choices) == 60
    assert served.process.wait(20) == 0
    assert all_gone(children)
    assert not served.left_behind


def test_a_killed_engine_is_an_error_to_all_and_leaves_nothing(serve: Any, model: Path) -> None:
    served = serve(model, "--set", "server.farewell_s=0")
    children = family(served)

    async def run() -> list[list[Any]]:
        streams = Streams(served.url, 16, max_tokens=15_000)
        await streams.all_begun()
        os.kill(served.engine_pid, signal.SIGKILL)
        return await streams.results()

    for events in asyncio.run(run()):
        assert events[-1] == "[DONE]"
        assert "engine" in events[-2]["error"]["message"]
        assert all(event["choices"][0]["finish_reason"] is None for event in events[:-2])
    assert served.process.wait(20) == 1
    assert all_gone(children)


@pytest.fixture(scope="module")
def long_running(serve: Any, model: Path) -> Any:
    return serve(model, "--max-num-seqs", "64")


def test_a_client_that_does_not_read_costs_bounded_memory(long_running: Any) -> None:
    where, server = httpx.URL(long_running.url), psutil.Process(long_running.process.pid)

    def num_running() -> float:
        return float(long_running.gauge("pegboard_num_requests_running"))

    def num_aborted() -> float:
        return float(long_running.gauge("pegboard_aborted_requests_total"))

    aborted_before, before = num_aborted(), server.memory_info().rss
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((where.host, where.port))
    content = json.dumps(body(5_000, logprobs=20, n=32)).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with connection:
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        # It may be given up before a second is over, so that no look finds it running.
        wait_until(lambda: num_aborted() > aborted_before, 60)
        wait_until(lambda: num_running() == 0, 20)
        assert server.memory_info().rss - before < 20e6
        # The tokens sent before are there, and then the reason. On a busy machine the clock of a client
        # that reads nothing may be the faster one; then the answer is cut off. Neither looks like an end.
        connection.settimeout(20)
        tail = b""
        while received := connection.recv(2**16):
            tail = tail[-4096:] + received
            if b"[DONE]" in tail:
                break
    assert b"reads too slowly" in tail or not tail.endswith((b"0\r\n\r\n", b"[DONE]\n\n"))


def test_a_killed_server_leaves_no_process(long_running: Any) -> None:
    """The last test of this server."""
    served = long_running
    wait_until(lambda: len(family(served)) == 2, 20)
    children = family(served)
    assert "torch" not in Path(f"/proc/{served.process.pid}/maps").read_text()
    served.process.kill()
    served.process.wait()
    wait_until(lambda: all_gone(children), 20)
