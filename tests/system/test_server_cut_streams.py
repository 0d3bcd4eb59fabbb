"""Clients that leave at any point of a stream cost nothing, soon after the last of them has gone."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from pegboard.testing.tiny import write_tiny_model

AT_ONCE = 200
"""Clients a wave. Sixty-four sequences run, the others wait, so that clients leave in both states."""

BACK_S = 2.0
"""How long after the last cut all must be as it was."""

PLACES = ("connected", "head", "body", "sent", "answer's head", "chunks", "chunks", "chunks")
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes a close a reset."""


@pytest.fixture(scope="module")
def served(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = write_tiny_model(
        tmp_path_factory.mktemp("tiny"),
        tokenizer=True,
        num_hidden_layers=1,
        max_position_embeddings=20_000,
    )
    return serve(model, "--max-num-seqs", "64")


class Watch:
    """Resources that clients that have left must not hold."""

    METRICS = (
        "pegboard_num_requests_running",
        "pegboard_num_requests_waiting",
        "pegboard_kv_cache_usage_perc",
        "pegboard_http_tasks",
        "pegboard_http_requests_open",
    )

    def __init__(self, served: Any, http: httpx.Client) -> None:
        self._served, self._http = served, http
        pids = (served.process.pid, served.engine_pid)
        self._processes = [psutil.Process(pid) for pid in pids]
        # The engine's numbers come once a second; these are of a time after the last request.
        time.sleep(2.5)
        self.baseline = self.reading()
        assert list(self.baseline.values())[:3] == [0, 0, 0]

    def reading(self) -> dict[str, float]:
        found = {name: self._served.gauge(name, self._http) for name in self.METRICS}
        kinds = ("server", "engine")
        fds = [process.num_fds() for process in self._processes]
        return found | {f"file descriptors of the {k}": n for k, n in zip(kinds, fds, strict=True)}

    def above(self, since: float) -> dict[str, tuple[float, float]]:
        """The numbers that have grown: now, and then. The engine's count when they were made
        after a time of the monotonic clock."""
        allowed = time.monotonic() - since
        age = self._served.gauge("pegboard_engine_metrics_age_seconds", self._http)
        now, then = self.reading(), self.baseline
        found = {name: (now[name], then[name]) for name in then if now[name] > then[name]}
        return found if age < allowed else found | {"age of the engine's numbers": (age, allowed)}


@pytest.fixture
def watch(served: Any) -> Iterator[Watch]:
    with httpx.Client(timeout=60) as http:
        for path, prompt in (
            ("completions", {"prompt": [5]}),
            ("chat/completions", {"messages": HI}),
        ):
            body = {**prompt, "max_tokens": 1}
            assert http.post(f"{served.url}/v1/{path}", json=body).status_code == 200
        yield Watch(served, http)


HI = [{"role": "user", "content": "Hello"}]


def request(choose: random.Random) -> tuple[bytes, bytes]:
    """Head and body of a stream that goes on for as long as anybody reads."""
    fields = {"max_tokens": 15_000, "ignore_eos": True, "return_token_ids": True, "stream": True}
    path = "/v1/completions"
    prompt: dict[str, Any] = {
        "prompt": [choose.randrange(2, 500) for _ in range(choose.randint(1, 60))]
    }
    if choose.random() < 0.3:
        path, prompt = "/v1/chat/completions", {"messages": HI}
    body = json.dumps({**prompt, **fields, "n": choose.choice([1, 1, 1, 2])}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode(), body


async def visit(url: httpx.URL, number: int) -> str:
    """One client, which leaves at a place that its number decides; the place."""
    choose = random.Random(number)
    place = choose.choice(PLACES)
    head, body = request(choose)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    match place:
        case "connected":
            await asyncio.sleep(choose.uniform(0, 0.2))
        case "head":
            writer.write(head[: choose.randrange(1, len(head))])
        case "body":
            writer.write(head + body[: choose.randrange(len(body))])
        case "sent":
            writer.write(head + body)
            await asyncio.sleep(choose.uniform(0, 0.2))
        case "answer's head":
            writer.write(head + body)
            await reader.readexactly(choose.randint(1, 100))
        case _:
            writer.write(head + body)
            await read_chunks(reader, choose.randint(1, 30))
            # Perhaps in the midst of the next one.
            await reader.readexactly(choose.randint(0, 200))
    if choose.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
    writer.close()
    return place


async def read_chunks(reader: asyncio.StreamReader, count: int) -> None:
    line = await reader.readline()
    assert line == b"HTTP/1.1 200 OK\r\n", line
    while count:
        line = await reader.readline()
        assert line
        if line.startswith(b"data: "):
            assert b'"error"' not in line and b"[DONE]" not in line
            count -= 1


async def wave(url: str, numbers: range) -> list[str]:
    async with asyncio.timeout(240):
        return await asyncio.gather(*(visit(httpx.URL(url), number) for number in numbers))


@pytest.mark.timing
@pytest.mark.parametrize("count", [AT_ONCE, pytest.param(1000, marks=pytest.mark.slow)])
def test_streams_cut_anywhere_leave_nothing(
    served: Any, watch: Watch, own_time: Any, count: int
) -> None:
    aborted = "pegboard_aborted_requests_total"
    aborted_before = served.gauge(aborted)
    places: Counter[str] = Counter()
    for first in range(0, count, AT_ONCE):
        places.update(asyncio.run(wave(served.url, range(first, first + AT_ONCE))))
        since_the_last_cut = own_time(served.process.pid, served.engine_pid)
        left = time.monotonic()
        while above := watch.above(left):
            assert since_the_last_cut.seconds() < BACK_S, above
            time.sleep(0.02)
        assert since_the_last_cut.seconds() < BACK_S
        print(f"at the baseline after {since_the_last_cut.seconds():.2f} s")
    assert places.total() == count
    assert min(places[place] for place in PLACES) >= count / 20
    # Those that read a part of an answer left a request that ran.
    num_cut = places["answer's head"] + places["chunks"]
    assert served.gauge(aborted) - aborted_before >= num_cut
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": [5]}, timeout=60)
    assert answer.status_code == 200
    assert "Traceback" not in served.log
