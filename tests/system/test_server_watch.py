"""A process that is silent and a step that hangs are told of in time, and no request waits for them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import APIError

from pegboard.interfaces import drafter
from pegboard.testing.tiny import write_tiny_model

SLEEPER = """# /// pegboard
# plugin = {{name = "sleeper"}}
# provides = [{{interface = "drafter", version = {version}, name = "sleeper", summary = "Never answers"}}]
# ///
import time

from pegboard import hookimpl
from pegboard.interfaces.drafter import Drafter


class Sleeper(Drafter):
    def admit(self, admission, block_tables):
        pass

    def release(self, row, num_tokens):
        pass

    def propose(self, seen):
        time.sleep(10_000)


@hookimpl
def pegboard_drafters():
    return {{"sleeper": lambda context: Sleeper()}}
"""

UNENDING = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, tokenizer=True, max_position_embeddings=20_000)


@pytest.fixture
def sleeper(tmp_path: Path) -> tuple[str, ...]:
    """Arguments that name a drafter which never returns."""
    file = tmp_path / "sleeper.py"
    file.write_text(SLEEPER.format(version=drafter.VERSION))
    return "--set", f"plugins.load=[{file}]", "--set", "drafter=sleeper"


def clocks(**seconds: int) -> Iterator[str]:
    for name, value in seconds.items():
        yield from ("--set", f"server.{name}_s={value}")


def wait_for(url: str, status: str, timeout_s: float = 40.0) -> dict[str, Any]:
    """The answer of `/ready` and `/health` once it is this, both the same."""
    deadline = time.monotonic() + timeout_s
    while True:
        ready, health = httpx.get(f"{url}/ready"), httpx.get(f"{url}/health")
        if ready.json()["status"] == health.json()["status"] == status:
            expected = 200 if status == "ready" else 503
            assert ready.status_code == health.status_code == expected
            said: dict[str, Any] = ready.json()
            return said
        assert time.monotonic() < deadline, health.text
        time.sleep(0.1)


def test_a_step_that_never_ends_ends_all_requests_with_the_reason(
    serve: Any, model: Path, sleeper: tuple[str, ...]
) -> None:
    served = serve(model, *sleeper, *clocks(deadline=5, farewell=2))
    engine = psutil.Process(served.engine_pid)
    with pytest.raises(APIError, match="step 0 hangs"):
        list(served.stream_completion(model=str(model), prompt=[5, 6, 7], max_tokens=20))
    reason = wait_for(served.url, "dead")["reason"]
    assert "step 0 hangs" in reason and "server.deadline_s: 5" in reason
    assert "sequences running: " in reason
    refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": [5]})
    assert refused.status_code == 503 and reason in refused.json()["error"]["message"]
    assert httpx.get(f"{served.url}/live").status_code == 200
    assert served.process.wait(40) == 1
    assert not engine.is_running() and not served.left_behind
    assert reason in served.log and "Traceback" not in served.log


def test_a_stopped_engine_is_told_of_until_it_goes_on(serve: Any, model: Path) -> None:
    served = serve(model, *clocks(silence=3))
    stream = served.stream_completion(
        model=str(model), prompt=[5, 6, 7], max_tokens=15_000, extra_body=UNENDING
    )
    next(stream)
    os.kill(served.engine_pid, signal.SIGSTOP)
    reason = wait_for(served.url, "silent")["reason"]
    assert "the engine's process has been silent for" in reason and "its last sign: " in reason
    refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": [5]})
    assert refused.status_code == 503 and "silent" in refused.json()["error"]["message"]
    os.kill(served.engine_pid, signal.SIGCONT)
    assert wait_for(served.url, "ready") == {"status": "ready"}
    next(stream)
    # Time in which the server itself stood still is nobody's silence.
    served.process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    served.process.send_signal(signal.SIGCONT)
    assert httpx.get(f"{served.url}/ready").json() == {"status": "ready"}
    next(stream)


def test_an_engine_that_stays_silent_is_ended(serve: Any, model: Path) -> None:
    served = serve(model, *clocks(silence=2, deadline=5, farewell=0))
    os.kill(served.engine_pid, signal.SIGSTOP)
    assert served.process.wait(40) == 1
    assert re.search(r"has been silent for \d+ s; its last sign: ", served.log)
    assert not served.left_behind


@pytest.mark.slow
def test_clocks_as_they_are_set_from_the_start(
    serve: Any, model: Path, sleeper: tuple[str, ...]
) -> None:
    served = serve(model, *sleeper)
    began = time.monotonic()
    stream = served.stream_completion(model=str(model), prompt=[5, 6, 7], max_tokens=20)
    os.kill(served.engine_pid, signal.SIGSTOP)
    wait_for(served.url, "silent", timeout_s=15)
    os.kill(served.engine_pid, signal.SIGCONT)
    with pytest.raises(APIError, match="hangs"):
        list(stream)
    assert 30 <= time.monotonic() - began < 60
    ended = time.monotonic()
    assert served.process.wait(30) == 1
    assert time.monotonic() - ended > 14
