"""The line that the log gets every ten seconds under load, held against what the clients count."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from datetime import datetime
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
