"""A served plugin that errs: the answers stay what they are, and the server says what it does without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from pegboard.testing.tiny import write_tiny_model

RAISING = """# /// pegboard
# [plugin]
# name = "broken"
# [[provides]]
# interface = "scheduler"
# version = 0
# name = "broken"
# summary = "Raises in its third step"
# ///
from pegboard import hookimpl
from pegboard.interfaces.scheduler import Scheduler


class Broken(Scheduler):
    num_plans = 0

    def plan(self, queue, step):
        self.num_plans += 1
        for seq in [*queue.running, *queue.waiting]:
            step.add(seq, seq.num_pending)
        if self.num_plans > 2:
            raise ValueError("no plan for this")


@hookimpl
def pegboard_schedulers():
    return {"broken": lambda context: Broken()}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True)


def answers(url: str, model: Path) -> list[list[int]]:
    found = []
    for number in range(4):
        body = {
            "model": str(model),
            "prompt": [5, 6, 7 + number],
            "max_tokens": 12,
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0]["token_ids"])
    return found


def test_a_scheduler_that_raises_changes_no_answer_and_is_named(
    serve: Any, model: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text(RAISING)
    well = serve(model)
    assert httpx.get(f"{well.url}/health").json() == {"status": "ready"}
    broken = serve(model, "--set", f"plugins.load=['{plugin}']", "--set", "scheduler.name=broken")
    assert answers(broken.url, model) == answers(well.url, model)

    deadline = time.monotonic() + 20
    while "cut_off" not in (health := httpx.get(f"{broken.url}/health")).json():
        assert time.monotonic() < deadline, "the breaker is not told of"
        time.sleep(0.1)
    assert health.status_code == 200 and health.json()["status"] == "ready"
    (cut_off,) = health.json()["cut_off"]
    assert (cut_off["part"], cut_off["name"]) == ("scheduler", "broken")
    assert "ValueError: no plan for this (broken.py:" in cut_off["reason"]
    assert httpx.get(f"{broken.url}/ready").json() == {"status": "ready"}

    assert broken.gauge("pegboard_breaker_trips_total") >= 1
    assert broken.gauge("pegboard_breaker_open") == 1
    assert well.gauge("pegboard_breaker_trips_total") == 0
    lines = [line for line in broken.log.splitlines() if "is cut off" in line]
    assert lines and "kind=ValueError" in lines[0] and "no plan for this" in lines[0]
    assert "Traceback" not in broken.log
