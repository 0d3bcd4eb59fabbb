"""A real engine whose worker is another process: the same tokens, and errors that name what is wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pegboard import Config, Engine, SamplingParams
from pegboard.errors import CompositionRefused, ConfigError, EngineError, OptionsInvalid, UserError
from pegboard.interfaces import drafter, kernel
from pegboard.testing.guessing_drafter import GuessingDrafter
from pegboard.testing.tiny import write_tiny_model

Tokens = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def _config(model: Path, executor: Any = "processes", **values: Any) -> Config:
    return Config.from_values(
        {
            "model": str(model),
            "threads": 1,
            "max_model_len": 48,
            "kv_cache": {"block_size": 4, "verify": True},
            "scheduler": {"max_num_seqs": 3, "max_num_batched_tokens": 16},
            "executor": executor,
            **values,
        }
    )


def _tokens(engine: Engine) -> Tokens:
    """The outputs of five prompts, of which some begin alike; greedy and sampled in turn."""
    requests = [
        engine.submit(
            [i % 50 + 1 for i in range(2 + 4 * number)],
            SamplingParams(temperature=float(number % 2), seed=number, max_tokens=6),
        ).request_id
        for number in range(5)
    ]
    tokens: dict[str, list[int]] = {request: [] for request in requests}
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None
            tokens[delta.request_id].extend(delta.token_ids)
    return [tuple(tokens[request]) for request in requests]


def test_tokens_are_those_of_a_worker_in_this_process(model: Path) -> None:
    with Engine(_config(model, "local")) as local, Engine(_config(model)) as processes:
        expected = _tokens(local)
        assert all(expected)
        assert _tokens(processes) == expected
        assert _tokens(processes) == expected, (
            "now with blocks of a prefix cache, compared bit by bit"
        )


def test_an_object_for_the_worker_is_refused(model: Path) -> None:
    with pytest.raises(CompositionRefused, match="drafter: an object of this process"):
        Engine(
            _config(model, drafter={"name": "auto", "num_speculative_tokens": 2}),
            drafter=GuessingDrafter({}, 0.5, 1, 0),
        )


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"address": "tcp://here:1"}, OptionsInvalid, "executor.options.address"),
        ({"address": "127.0.0.1:80"}, OptionsInvalid, "executor.options.address"),
        ({"address": "[::1]:80"}, OptionsInvalid, "executor.options.address"),
        ({"address": "192.0.2.1"}, ConfigError, "executor.options.address: 192.0.2.1 cannot be"),
        ({"launch": ["/does/not/exist"]}, ConfigError, "executor.options.launch: .*No such file"),
        ({"launch": ["en\0v"]}, ConfigError, "executor.options.launch: embedded null byte"),
        ({"launch": ["false"]}, EngineError, "worker 0 ended with status 1 while starting"),
    ],
)
def test_what_cannot_be_started_is_said(
    model: Path, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Engine(_config(model, {"name": "processes", "options": options}))


PLUGIN = """# /// pegboard
# plugin = {{name = "odd"}}
# [[provides]]
# interface = "{interface}"
# version = {version}
# name = "odd"
# summary = "Fails where it is made or tested"
# {more}
# ///
from pegboard import hookimpl
from pegboard.interfaces.kernel import SiluMulKernel


class Odd(SiluMulKernel):
    def self_test(self):
        raise AssertionError("two and two are five")

    def silu_mul(self, gate, up):
        raise AssertionError


def make(context):
    if "{interface}" == "drafter":
        raise ValueError("no guesses here")
    return Odd()


@hookimpl
def pegboard_{interface}s():
    return {{"odd": make}}
"""


def test_a_plugin_that_fails_in_the_worker_is_named(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(PLUGIN.format(interface="drafter", version=drafter.VERSION, more=""))
    with pytest.raises(UserError, match=r"plugin 'odd' .*: no guesses here"):
        Engine(_config(model, drafter="odd", plugins={"load": [str(file)]}))


def test_a_kernel_that_fails_its_self_test_in_the_worker_gives_way(
    model: Path, tmp_path: Path
) -> None:
    operations = 'priority = 999\n# operations = [{operation = "silu_mul", row_invariant = true}]'
    file = tmp_path / "odd.py"
    text = PLUGIN.format(interface="kernel", version=kernel.VERSION, more=operations)
    file.write_text(text)
    plugins = {"load": [str(file)]}
    with Engine(_config(model, "local")) as local, Engine(_config(model, plugins=plugins)) as other:
        assert not {one.part.name for one in other.prepared.composition.target.kernels} & {"odd"}
        assert _tokens(other) == _tokens(local)


LEFT_OPEN = """
import sys
from pegboard import Engine
engine = Engine({{"model": {model!r}, "threads": 1, "max_model_len": 48, "executor": "processes"}})
print(engine.core._parts.executor._workers[0]._process.pid, flush=True)
{then}
"""


@pytest.mark.parametrize(
    "then",
    ["sys.exit(3)", pytest.param("import os; os.kill(os.getpid(), 9)", marks=pytest.mark.slow)],
)
def test_a_worker_ends_with_a_program_that_does_not_close_it(model: Path, then: str) -> None:
    code = LEFT_OPEN.format(model=str(model), then=then)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert done.returncode == (3 if "exit" in then else -9)
    assert _ends(int(done.stdout))


def _ends(pid: int) -> bool:
    deadline = time.monotonic() + 15
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
