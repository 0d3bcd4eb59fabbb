"""A plugin whose validator raises for one request: the engine's process and all others go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.testing.tiny import write_tiny_model

COMPLETIONS = "/v1/completions"

PLUGIN = """# /// pegboard
# [plugin]
# name = "touchy"
# [[provides]]
# interface = "logits_processor"
# version = 1
# name = "touchy"
# summary = "Raises what it is asked to"
# params = ":Params"
# ///
import builtins
from typing import Any

from pydantic import BaseModel, model_validator

from pegboard import hookimpl
from pegboard.interfaces.logits_processor import LogitsProcessor


class Params(BaseModel):
    raises: str = ""
    nested: Any = None
    spoils: bool = False

    @model_validator(mode="after")
    def check(self):
        if self.raises:
            raise getattr(builtins, self.raises)("on request")
        if self.spoils:
            self.nested = object()
        return self


class Touchy(LogitsProcessor):
    def __init__(self, context): ...
    def admit(self, row, params): ...
    def apply(self, logits, rows): ...
    def release(self, row): ...


@hookimpl
def pegboard_logits_processors():
    return {"touchy": Touchy}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, tokenizer=True, num_hidden_layers=1)


@pytest.fixture(scope="module")
def served(serve: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    plugin = tmp_path_factory.mktemp("plugin") / "touchy.py"
    plugin.write_text(PLUGIN)
    load = ("--set", f"plugins.load=[{plugin}]")
    return serve(model, *load, "--set", "logits_processors=[touchy]", "--max-model-len", "256")


@pytest.fixture(scope="module")
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


@pytest.mark.parametrize("error", ["MemoryError", "RecursionError", "RuntimeError", "SystemExit"])
def test_a_fault_at_intake_is_the_answer_of_its_request_alone(
    served: Any, http: httpx.Client, error: str
) -> None:
    wanted = {"max_tokens": 60, "ignore_eos": True, "seed": 1, "return_token_ids": True}
    expected = http.post(COMPLETIONS, json={"prompt": [5], **wanted}).json()["choices"][0]
    body = {"prompt": [5], "stream": True, **wanted}
    with http.stream("POST", COMPLETIONS, json=body) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        fails = {"prompt": [[6], [7]], "n": 2, "processors": {"touchy": {"raises": error}}}
        answer = httpx.post(served.url + COMPLETIONS, json=fails, timeout=60)
        assert answer.status_code == 500
        assert f"could not be taken: {error}: on request" in answer.json()["error"]["message"]
        rest = [first, *lines]
    assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
    assert expected["finish_reason"] == "length"
    assert psutil.Process(served.engine_pid).ppid() == served.process.pid
    assert http.post(COMPLETIONS, json={"prompt": [5], **wanted}).json()["choices"][0] == expected


def test_parameters_too_deep_to_copy_are_refused(served: Any, http: httpx.Client) -> None:
    nested: Any = 1
    for _ in range(100):
        nested = [nested]
    body = {"prompt": [5], "processors": {"touchy": {"nested": nested}}}
    answer = http.post(COMPLETIONS, json=body)
    assert answer.status_code == 400, answer.text
    assert http.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1}).status_code == 200


def test_parameters_that_a_plugin_spoils_are_not_the_clients_mistake(
    served: Any, http: httpx.Client
) -> None:
    answer = http.post(
        COMPLETIONS, json={"prompt": [5], "processors": {"touchy": {"spoils": True}}}
    )
    assert answer.status_code == 500, answer.text
    assert "logits processor 'touchy'" in answer.json()["error"]["message"]


def test_min_tokens_where_every_token_ends_is_refused(model: Path, http: httpx.Client) -> None:
    every = list(range(json.loads((model / "config.json").read_text())["vocab_size"]))
    body = {"prompt": [5], "min_tokens": 2, "stop_token_ids": every}
    answer = http.post(COMPLETIONS, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "stop_token_ids"
    body |= {"stop_token_ids": every[:-1], "ignore_eos": True}
    assert http.post(COMPLETIONS, json=body).status_code == 200
