"""The log has a line for each request, and under load one every ten seconds, held against what
the clients count."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from pegboard.testing.tiny import write_tiny_model

NUM_CLIENTS = 5
NUM_RUNNING = 3
NUM_PROMPT = 30
PERIOD_S = 10.0

SUMMARY = re.compile(
    r"^(?P<when>\S+ \S+) INFO pegboard\.engine: summary prompt_tokens_per_s=(?P<prompt>\S+)"
    r" output_tokens_per_s=(?P<output>\S+) running=(?P<running>\d+) waiting=(?P<waiting>\d+)"
    r" kv_used=(?P<kv>\S+)% hit_rate=(?:\S+%|-)$",
    re.MULTILINE,
)


class Clients:
    """Streams without end, whose tokens are counted."""

    def __init__(self, served: Any) -> None:
        self.num_tokens = 0
        self._served = served

    async def run(self, until_num_summaries: int) -> list[tuple[float, int]]:
        """Reads until the log has so many summaries; the time and the tokens when each came."""
        async with httpx.AsyncClient(base_url=self._served.url, timeout=60) as http:
            tasks = [asyncio.create_task(self._read(http, seed)) for seed in range(NUM_CLIENTS)]
            seen: list[tuple[float, int]] = []
            async with asyncio.timeout(240):
                while len(seen) < until_num_summaries:
                    assert not any(task.done() for task in tasks)
                    if len(SUMMARY.findall(self._served.log)) > len(seen):
                        seen.append((time.monotonic(), self.num_tokens))
                    await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return seen

    async def _read(self, http: httpx.AsyncClient, seed: int) -> None:
        choose = random.Random(seed)
        body = {
            "prompt": [choose.randrange(2, 500) for _ in range(NUM_PROMPT)],
            "max_tokens": 90_000,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    self.num_tokens += len(choice["token_ids"])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("small"), num_hidden_layers=1)


MANY: Any = {"prompt": [[5, 6], [5, 6, 7]], "n": 64, "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def logging_server(serve: Any, small: Path) -> Any:
    return serve(small)


def lines_of(served: Any, **body: Any) -> list[str]:
    """The new lines of the log once a request has been answered."""
    before = served.log
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    # The next request's answer is written after the first one's line.
    httpx.get(f"{served.url}/live")
    log: str = served.log
    return [f"status={answer.status_code}", *log.removeprefix(before).splitlines()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_line_however_many_sequences_it_has(
    logging_server: Any, stream: bool
) -> None:
    _, line = lines_of(logging_server, stream=stream, **MANY)
    for part in (
        "request status=200 path='/v1/completions' id=cmpl-",
        "prompts=2 sequences=128 reasons=length:128 prompt_tokens=5",
        "output_tokens=384 ttft_s=",
    ):
        assert part in line


def test_a_refusal_is_a_line(logging_server: Any) -> None:
    status, line = lines_of(logging_server, prompt=[5], temprature=1)
    assert status == "status=400"
    assert "refused status=400" in line and "temprature" in line


def test_what_is_no_http_is_a_line(logging_server: Any) -> None:
    before, where = logging_server.log, httpx.URL(logging_server.url)
    with socket.create_connection((where.host, where.port or 80), 20) as connection:
        connection.sendall(b"\x16\x03\x01 what?\r\n\r\n")
        while connection.recv(2**16):
            pass
    (line,) = logging_server.log.removeprefix(before).splitlines()
    assert "refused status=400 path=- client=127.0.0.1:" in line and line.isprintable()


def test_a_request_without_log_has_no_line(serve: Any, small: Path) -> None:
    served = serve(small, "--disable-log-requests")
    assert lines_of(served, **MANY) == ["status=200"]
    assert lines_of(served, prompt=[5], temprature=1) == ["status=400"]


@pytest.mark.timing
@pytest.mark.slow
def test_under_load_a_line_every_ten_seconds_says_what_the_clients_see(
    serve: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = write_tiny_model(
        tmp_path_factory.mktemp("tiny"), num_hidden_layers=1, max_position_embeddings=100_000
    )
    served = serve(model, "--max-num-seqs", str(NUM_RUNNING))
    (_, first_tokens), *later = seen = asyncio.run(Clients(served).run(2))
    lines = [match.groupdict() for match in SUMMARY.finditer(served.log)]
    times = [datetime.strptime(line["when"], "%Y-%m-%d %H:%M:%S,%f") for line in lines]
    assert PERIOD_S <= (times[1] - times[0]).total_seconds() + 0.01 < PERIOD_S + 2
    for line in lines:
        assert (int(line["running"]), int(line["waiting"])) == (NUM_RUNNING, 2)
        assert 0 < float(line["kv"]) <= 100
    assert float(lines[1]["kv"]) > float(lines[0]["kv"])
    # All prompts that run were read in the first ten seconds.
    assert float(lines[0]["prompt"]) == pytest.approx(NUM_RUNNING * NUM_PROMPT / PERIOD_S, rel=0.15)
    assert float(lines[1]["prompt"]) == 0
    ((last_time, last_tokens),) = later
    counted = (last_tokens - first_tokens) / (last_time - seen[0][0])
    assert float(lines[1]["output"]) == pytest.approx(counted, rel=0.15)
    # Idle time is told of by silence.
    time.sleep(PERIOD_S + 2)
    assert len(SUMMARY.findall(served.log)) == 2
