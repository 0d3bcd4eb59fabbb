"""A server whose worker is a process of its own: what befalls that is told in time, and nothing is left."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import APIError

from pegboard.interfaces import kernel
from pegboard.testing.tiny import write_tiny_model

PROCESSES = ("--set", "executor=processes")
UNENDING = {"ignore_eos": True, "return_token_ids": True}

TOLD_S = 15.0
"""Within so long, what befell a worker is told."""

SLEEPER = """# /// pegboard
# plugin = {{name = "sleeper"}}
# [[provides]]
# interface = "kernel"
# version = {version}
# name = "sleeper"
# summary = "Never ends what it has begun"
# operations = [{{operation = "silu_mul"}}, {{operation = "linear"}}]
# ///
import time

from pegboard import hookimpl
from pegboard.interfaces.kernel import LinearKernel, SiluMulKernel


class SleepsInAStep(SiluMulKernel):
    def self_test(self):
        pass

    def silu_mul(self, gate, up):
        time.sleep(10_000)


class SleepsAtTheStart(LinearKernel):
    gathers = True

    def self_test(self):
        pass

    def prepare(self, weight):
        time.sleep(10_000)

    def linear(self, x, weight):
        raise AssertionError

    def gather_rows(self, weight, rows):
        raise AssertionError


@hookimpl
def pegboard_kernels():
    kinds = {{"silu_mul": SleepsInAStep, "linear": SleepsAtTheStart}}
    return {{"sleeper": lambda context: kinds[context.operation]()}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, tokenizer=True, max_position_embeddings=20_000)


@pytest.fixture
def sleeper(tmp_path: Path) -> Callable[[str], tuple[str, ...]]:
    """Arguments that name a kernel which never returns, for an operation."""
    file = tmp_path / "sleeper.py"
    file.write_text(SLEEPER.format(version=kernel.VERSION))
    return lambda operation: (
        *("--set", f"plugins.load=[{file}]", "--set", f"kernels={{{operation}: sleeper}}"),
        *("--set", "numerics=fast"),
    )


def worker_of(served: Any) -> psutil.Process:
    found = [
        process
        for process in psutil.Process(served.process.pid).children(recursive=True)
        if "pegboard.runner_main" in process.cmdline()
    ]
    (worker,) = found
    return worker


def told(served: Any, status: str, timeout_s: float = TOLD_S) -> str:
    """The reason that `/ready` and `/health` give once both answer 503 with this status."""
    deadline = time.monotonic() + timeout_s
    while True:
        answers = [httpx.get(f"{served.url}/{path}") for path in ("ready", "health")]
        said = [answer.json() for answer in answers]
        if all(one["status"] == status for one in said):
            assert all(answer.status_code == 503 for answer in answers)
            return str(said[0]["reason"])
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


def leaves_nothing(served: Any, family: list[psutil.Process]) -> None:
    assert served.process.wait(20) == 1
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert not served.left_behind


def test_a_killed_worker_ends_what_is_open_and_is_told(serve: Any, model: Path) -> None:
    served = serve(model, *PROCESSES, "--set", "server.farewell_s=2")
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "the dog", "max_tokens": 4})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    engine_maps = Path(f"/proc/{served.engine_pid}/maps").read_text()
    assert "libtorch" not in engine_maps, "torch is the worker's"
    family = psutil.Process(served.process.pid).children(recursive=True)
    stream = served.stream_completion(
        model=str(model), prompt=[5, 6, 7], max_tokens=15_000, extra_body=UNENDING
    )
    next(stream)
    worker_of(served).kill()
    with pytest.raises(APIError, match="worker 0 was killed by SIGKILL while"):
        list(stream)
    assert "worker 0 was killed by SIGKILL while" in told(served, "dead")
    leaves_nothing(served, family)


def test_a_stopped_worker_is_told_of_and_ends_in_time(serve: Any, model: Path) -> None:
    served = serve(
        model, *PROCESSES, "--set", "server={silence_s: 3, deadline_s: 8, farewell_s: 1}"
    )
    family = psutil.Process(served.process.pid).children(recursive=True)
    worker = worker_of(served)
    worker.suspend()
    reason = told(served, "silent")
    assert "worker 0 has been silent for" in reason and "its last sign: " in reason
    worker.resume()
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": [5], "max_tokens": 4})
    while answer.status_code == 503:
        answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": [5], "max_tokens": 4})
    assert answer.status_code == 200
    stream = served.stream_completion(
        model=str(model), prompt=[5, 6, 7], max_tokens=15_000, extra_body=UNENDING
    )
    next(stream)
    worker.suspend()
    # Its silence is the reason where a busy machine made an earlier step so slow that this one may go on.
    with pytest.raises(
        APIError, match=r"hangs: it has taken .*worker 0 is|worker 0 has been silent"
    ):
        list(stream)
    leaves_nothing(served, family)


@pytest.mark.slow
def test_a_worker_killed_at_rest_is_told(serve: Any, model: Path) -> None:
    served = serve(model, *PROCESSES, "--set", "server.farewell_s=2")
    family = psutil.Process(served.process.pid).children(recursive=True)
    worker_of(served).kill()
    assert "worker 0 was killed by SIGKILL while idle" in told(served, "dead")
    leaves_nothing(served, family)


@pytest.mark.slow
def test_a_worker_stopped_at_rest_is_told_by_the_clock_as_it_is(serve: Any, model: Path) -> None:
    served = serve(model, *PROCESSES)
    family = psutil.Process(served.process.pid).children(recursive=True)
    worker_of(served).suspend()
    assert re.search(r"worker 0 has been silent for 1\d s", told(served, "silent"))
    assert re.search(r"worker 0 has been silent for 3\d s", told(served, "dead", 30.0))
    leaves_nothing(served, family)


@pytest.mark.slow
def test_a_kernel_that_never_returns_is_a_worker_that_hangs(
    serve: Any, model: Path, sleeper: Callable[[str], tuple[str, ...]]
) -> None:
    clocks = ("--set", "server={deadline_s: 5, farewell_s: 5}")
    served = serve(model, *PROCESSES, *sleeper("silu_mul"), *clocks)
    family = psutil.Process(served.process.pid).children(recursive=True)
    body = {"prompt": [5], "max_tokens": 4}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 503
    assert "step 0 hangs" in answer.json()["error"]["message"]
    assert "worker 0 is in step 0 for" in told(served, "dead")
    leaves_nothing(served, family)


@pytest.mark.slow
def test_what_befalls_a_worker_while_it_loads_is_told(
    serve: Any, model: Path, sleeper: Callable[[str], tuple[str, ...]]
) -> None:
    clocks = ("--set", "server={silence_s: 5, deadline_s: 5, farewell_s: 5}")
    served = serve(model, *PROCESSES, *sleeper("linear"), *clocks, until="listening on")
    assert httpx.get(f"{served.url}/ready").json() == {"status": "loading"}
    family = psutil.Process(served.process.pid).children(recursive=True)
    worker = worker_of(served)
    worker.suspend()
    reason = told(served, "silent")
    assert "worker 0 has been silent for" in reason and "starting for" in reason
    time.sleep(1)
    assert told(served, "silent"), "a start may be silent for longer than a step may take"
    worker.kill()
    assert "worker 0 was killed by SIGKILL while starting for" in told(served, "dead")
    leaves_nothing(served, family)
