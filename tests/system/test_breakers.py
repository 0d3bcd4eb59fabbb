"""A served plugin that errs, at each depth: answers stay what they are, and the server names the plugin."""

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
# version = 1
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


@pytest.fixture(scope="module")
def well(serve: Any, model: Path) -> Any:
    return serve(model)


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


DRAFTER = """# /// pegboard
# [plugin]
# name = "broken"
# [[provides]]
# interface = "drafter"
# version = 1
# name = "broken"
# summary = "Raises in its third step"
# ///
import numpy as np

from pegboard import hookimpl
from pegboard.interfaces.drafter import Drafter
from pegboard.step import Drafts

NONE = np.zeros(0, np.int32)


class Broken(Drafter):
    num_steps = 0

    def admit(self, admission, block_tables):
        pass

    def release(self, row, num_tokens):
        pass

    def propose(self, seen):
        self.num_steps += 1
        if self.num_steps > 2:
            raise ValueError("no guess for this")
        drafts = Drafts(rows=NONE, offsets=np.zeros(1, np.int32), token_ids=NONE, parents=NONE)
        return drafts, np.zeros(0, np.float32)


@hookimpl
def pegboard_drafters():
    return {"broken": lambda context: Broken()}
"""


# The drafter above, which would raise later.
POLICY = (
    DRAFTER.replace(
        "# ///\nimport",
        """# [[provides]]
# interface = "speculation_policy"
# version = 1
# name = "broken"
# summary = "Raises in its first step"
# ///
import""",
    )
    + """

from pegboard.interfaces.speculation_policy import SpeculationPolicy


class Undecided(SpeculationPolicy):
    def choose(self, rows, tokens_left, costs):
        raise ValueError("no choice for this")


@hookimpl
def pegboard_speculation_policies():
    return {"broken": lambda context: Undecided()}
"""
).replace("num_steps > 2", "num_steps > 10**6")


@pytest.mark.parametrize(
    "depth", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["depth_1", "depth_2"]
)
@pytest.mark.parametrize(
    ("part", "plugin", "settings", "said"),
    [
        ("scheduler", RAISING, ["scheduler.name=broken"], "no plan for this"),
        pytest.param(
            "drafter",
            DRAFTER,
            ["drafter.name=broken"],
            "no guess for this",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "speculation_policy",
            POLICY,
            ["drafter.name=broken", "drafter.policy=broken"],
            "no choice for this",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["scheduler", "drafter", "speculation_policy"],
)
def test_a_part_that_raises_changes_no_answer_and_is_named(
    serve: Any,
    well: Any,
    model: Path,
    tmp_path: Path,
    part: str,
    plugin: str,
    settings: list[str],
    said: str,
    depth: int,
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(plugin)
    assert httpx.get(f"{well.url}/health").json() == {"status": "ready"}
    settings = [f"plugins.load=['{file}']", f"executor.depth={depth}", *settings]
    broken = serve(model, *(word for setting in settings for word in ("--set", setting)))
    assert answers(broken.url, model) == answers(well.url, model)

    deadline = time.monotonic() + 20
    while "cut_off" not in (health := httpx.get(f"{broken.url}/health")).json():
        assert time.monotonic() < deadline, "the breaker is not told of"
        time.sleep(0.1)
    assert health.status_code == 200 and health.json()["status"] == "ready"
    (cut_off,) = health.json()["cut_off"]
    assert (cut_off["part"], cut_off["name"]) == (part, "broken")
    assert f"ValueError: {said} (broken.py:" in cut_off["reason"]
    assert httpx.get(f"{broken.url}/ready").json() == {"status": "ready"}

    assert broken.gauge("pegboard_breaker_trips_total") >= 1
    assert broken.gauge("pegboard_breaker_open") == 1
    assert well.gauge("pegboard_breaker_trips_total") == 0
    lines = [line for line in broken.log.splitlines() if "is cut off" in line]
    assert lines and "kind=" in lines[0] and f"ValueError: {said}" in lines[0]
    assert "Traceback" not in broken.log
