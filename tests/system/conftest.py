"""Models and servers that the system tests share."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI
from openai.types import Completion

from pegboard.testing.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family to a tiny float64 checkpoint."""
    folder = tmp_path_factory.mktemp("tiny")
    families = ("llama", "mistral", "qwen2", "qwen3")
    return {
        family: write_tiny_model(folder / family, family, dtype="float64") for family in families
    }


@pytest.fixture(scope="session")
def small_config(tiny_models: dict[str, Path]) -> dict[str, Any]:
    """An engine of a tiny float64 model on one thread, in blocks of four tokens."""
    return {
        "model": str(tiny_models["llama"]),
        "max_model_len": 64,
        "dtype": "float64",
        "kv_cache": {"block_size": 4},
        "threads": 1,
    }


@pytest.fixture(scope="session")
def texts(shared_folder: Path) -> list[str]:
    """Prompts that people wrote, of many kinds, at most a few hundred characters each."""
    file = shared_folder / "fixtures" / "text" / "spec_bench.jsonl"
    if not file.is_file():
        pytest.skip("the shared material holds no fixtures/text/spec_bench.jsonl")
    prompts = [json.loads(line)["turns"][0] for line in file.read_text().splitlines()]
    return [prompt[:300] for prompt in prompts[::8]]


class Served:
    """A server in a process of its own, on a free port of the loopback device."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self._folder = folder
        self._log = folder / "log"

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def left_behind(self) -> list[Path]:
        """The temporary files of its processes."""
        return list(self._folder.glob("pegboard-*"))

    @property
    def url(self) -> str:
        """The URL on which it listens."""
        found = re.search(r"listening on (\S+)", self.log)
        assert found, self.log
        return found[1]

    @property
    def engine_pid(self) -> int:
        found = re.search(r"engine ready: pid=(\d+)", self.log)
        assert found, self.log
        return int(found[1])

    def gauge(self, name: str, http: httpx.Client | None = None) -> float:
        """A metric's value, summed over its labels; asked for on a connection of its own, or of `http`."""
        answer = (http or httpx).get(f"{self.url}/metrics", timeout=20)
        assert answer.status_code == 200, answer.text
        lines = answer.text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.split("[{ ]", line)[0] == name)

    def client(self, api_key: str = "none") -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1",
            api_key=api_key,
            max_retries=0,
            timeout=120,
            _strict_response_validation=True,
        )

    def stream_completion(self, **fields: Any) -> Iterator[Completion]:
        """The chunks of a streamed completion, each validated as strictly as whole answers are.

        The client's own type cannot hold a choice that goes on: it knows no `finish_reason` of null,
        which the API sends until the last chunk. So null alone is let through here.
        """
        lenient = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)
        with lenient as client, client.completions.create(stream=True, **fields) as stream:
            for chunk in stream:
                values: Any = chunk.to_dict()
                for choice in values["choices"]:
                    choice["finish_reason"] = choice["finish_reason"] or "stop"
                Completion.model_validate(values)
                yield chunk


class OwnTime:
    """Seconds since it was made, less those that processes spent waiting for a processor.

    Where nobody else computes, that is the time by the clock; where others do, it is what the clock
    would have shown without them, so that a bound in seconds can be held to anywhere. The processes
    are this one and those given, by their main threads, which wait for each other.
    """

    def __init__(self, *pids: int) -> None:
        self._files = [Path(f"/proc/{pid}/schedstat") for pid in (os.getpid(), *pids)]
        self._began, self._waited = time.perf_counter(), self._waiting()

    def seconds(self) -> float:
        return time.perf_counter() - self._began - (self._waiting() - self._waited)

    def _waiting(self) -> float:
        # The second of three numbers: nanoseconds spent ready to run, and not running.
        return sum(int(file.read_text().split()[1]) for file in self._files) / 1e9


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """(condition, timeout_s=20.0): waits for the condition."""

    def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    return wait_until


@pytest.fixture(scope="session")
def own_time() -> type[OwnTime]:
    return OwnTime


Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts servers that take requests: `serve(model, "--set", "...")`, with at most `num_files` open
    files if given. They end with the module."""
    servers = []

    def start(
        model: str | Path,
        *arguments: str,
        until: str = "Uvicorn running on",
        num_files: int | None = None,
    ) -> Served:
        folder = tmp_path_factory.mktemp("served")
        program = Path(sys.executable).with_name("pegboard")
        command = [str(program), "serve", str(model), "--port", "0", "--set", "threads=1"]
        if num_files is not None:
            command = ["bash", "-c", f'ulimit -n {num_files}; exec "$0" "$@"', *command]
        environment = {**os.environ, "TMPDIR": str(folder)}
        with (folder / "log").open("wb") as file:
            process = subprocess.Popen(
                [*command, *arguments], stderr=file, stdout=file, env=environment
            )
        served = Served(process, folder)
        servers.append(served)
        deadline = time.monotonic() + 180
        while until not in served.log:
            assert process.poll() is None, served.log
            assert time.monotonic() < deadline, served.log
            time.sleep(0.05)
        return served

    yield start
    for served in servers:
        served.process.kill()
        served.process.wait()


@pytest.fixture
def the_engine_stays(served: Served, http: httpx.Client) -> Iterator[None]:
    """The same processes serve on after each test of the module's `served`."""
    yield
    assert psutil.Process(served.engine_pid).ppid() == served.process.pid
    assert http.get("/health").status_code == 200
    answer = http.post("/v1/completions", json={"prompt": "the dog", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert "Traceback" not in served.log
