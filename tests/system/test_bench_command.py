"""`pegboard bench` as a person runs it, on servers that it starts and on one that runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.testing.tiny import write_tiny_model

PROGRAM = str(Path(sys.executable).with_name("pegboard"))
LOAD = ("--input-len", "4:40", "--output-len", "lognormal:4:40", "--seed", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_model(folder, tokenizer=True, num_hidden_layers=1))


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [PROGRAM, "bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    out, err = process.communicate(timeout=180)
    assert process.returncode == status, out + err
    return out


def wait_for(condition: Callable[[], Any], seconds: float = 90) -> Any:
    """The condition's value, once it is not empty."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The server of a benchmark, and the server's engine."""
    found = psutil.Process(process.pid).children(recursive=True)
    return found if len(found) >= 2 else []


class Charts(HTMLParser):
    """How many lines, areas and bars each figure's chart has."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, int] = {}
        self._figure = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "figure":
            self._figure = values["id"]
            self.shapes[self._figure] = 0
        if self._figure and values.get("class", "").split(" ")[0] in ("line", "area", "bar"):
            self.shapes[self._figure] += 1


def test_a_served_model_is_measured_and_shown(model: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {model}\nthreads: 1\nserver: {{api_keys: [secret]}}\n")
    numbers, page = tmp_path / "out.json", tmp_path / "out.html"
    process = start(
        *("--config", str(config), "--num-prompts", "40", "--request-rate", "20", *LOAD),
        *("--goodput", "ttft:60000", "itl:60000", "--json", str(numbers), "--html", str(page)),
    )
    out = finish(process)
    assert "40 completed, 0 failed" in out

    found = json.loads(numbers.read_text())
    assert (found["completed"], found["failed"], found["failures"]) == (40, 0, {})
    assert found["itl_per"] == "token"
    assert all(4 <= length <= 40 for length in found["input_lens"] + found["output_lens"])
    assert found["total_input_tokens"] == sum(found["input_lens"])
    assert found["total_output_tokens"] == sum(found["output_lens"])
    assert [len(gaps) + 1 for gaps in found["itls"]] == found["output_lens"]
    assert found["request_goodput"] == found["request_throughput"]
    assert found["duration"] >= found["scheduled_times"][-1] == pytest.approx(39 / 20)
    assert found["mean_ttft_ms"] > 0 < found["p99_e2el_ms"]
    # Every step brings each of its sequences at most one token.
    steps = {low: count for low, _, count in found["batch_sizes"]["bins"]}
    assert found["batch_sizes"]["of"] == "steps"
    assert sum(steps.values()) >= max(found["output_lens"])
    assert sum(low * count for low, count in steps.items()) <= found["total_output_tokens"]

    charts = Charts()
    charts.feed(page.read_text())
    assert set(charts.shapes) == {"latency", "throughput", "batch-size", "kv-use"}
    assert all(charts.shapes.values()), charts.shapes
    with pytest.raises(httpx.ConnectError):
        httpx.get(found["base_url"])


@pytest.mark.slow
def test_a_running_server_counts_the_same_tokens_and_a_wrong_key_is_one_line(
    serve: Any, model: str, tmp_path: Path
) -> None:
    keys = ("--api-key", "secret", "--set", "server.admin_keys=boss")
    served = serve(model, *keys, "--served-model-name", "tiny")
    numbers = tmp_path / "out.json"
    arguments = (
        "--url",
        f"{served.url}/v1",
        "--num-prompts",
        "30",
        "--max-concurrency",
        "4",
        *LOAD,
    )
    finish(start(*arguments, "--api-key", "boss", "--json", str(numbers)))
    found = json.loads(numbers.read_text())
    assert found["model_id"] == "tiny"
    assert found["max_concurrent_requests"] == 4

    def total(name: str) -> float:
        text = httpx.get(f"{served.url}/metrics", headers={"authorization": "Bearer boss"}).text
        return sum(
            float(n) for n in re.findall(rf"^pegboard_{name}_total\{{.*\}} (\S+)$", text, re.M)
        )

    # Beside the load there is one request that asks what the server can do, for 2 tokens.
    wait_for(lambda: total("generation_tokens") == found["total_output_tokens"] + 2, 10)
    assert 1 <= total("prompt_tokens") - found["total_input_tokens"] <= 8

    process = start("--url", served.url, "--api-key", "wrong", "--num-prompts", "1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("error: --api-key: the server refuses it")
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_interrupted_it_shows_what_it_has_and_leaves_nothing_running(
    number: signal.Signals, model: str, tmp_path: Path
) -> None:
    numbers = tmp_path / "out.json"
    load = ("--num-prompts", "2000", "--request-rate", "10", *LOAD)
    process = start(model, "--set", "threads=1", *load, "--json", str(numbers))
    server = wait_for(lambda: descendants(process))
    (listening,) = wait_for(lambda: _listening(server))
    # Answers have come once some were generated.
    wait_for(lambda: _answers(listening) >= 5)
    process.send_signal(number)
    out = finish(process, status=130)
    assert "interrupted with" in out
    found = json.loads(numbers.read_text())
    assert found["interrupted"]
    assert found["completed"] >= 1
    assert found["completed"] + found["open"] + found["unsent"] + found["failed"] == 2000
    assert not any(one.is_running() for one in server)


@pytest.mark.slow
def test_killed_it_takes_its_server_along(model: str) -> None:
    process = start(model, "--set", "threads=1", "--num-prompts", "2000", "--request-rate", "1")
    server = wait_for(lambda: descendants(process))
    process.kill()
    process.communicate()
    wait_for(lambda: not any(_alive(one) for one in server), 20)


def _listening(processes: list[psutil.Process]) -> list[str]:
    """Addresses of the loopback device that one of them listens on."""
    return [
        f"http://127.0.0.1:{connection.laddr.port}"
        for process in processes
        for connection in process.net_connections(kind="tcp4")
        if connection.status == psutil.CONN_LISTEN
    ]


def _answers(url: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    found = re.findall(r"^pegboard_request_success_total\{.*\} (\S+)$", text, re.M)
    return sum(map(float, found))


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
