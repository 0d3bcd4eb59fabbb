"""Every key of the config is acted on, or refused by its name.

Each leaf of the schema is set to a second legal value, beside what it needs to mean anything. Then the
composition or its memory is another one, or the refusal says the key. A leaf that stands in no table here
fails: a new setting is shown here to act. Those of `server.limits` are in
`test_server_limits`, the options of each plugin in `test_every_option`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from pegboard import LLM, SamplingParams
from pegboard.cli import main
from pegboard.compose import prepare
from pegboard.config import Config
from pegboard.config_text import all_keys, overlay
from pegboard.errors import CompositionRefused, UserError
from pegboard.plugins.contracts import CONTRACTS
from pegboard.testing.tiny import write_tiny_model, write_tiny_tokenizer

PLUGIN = """# /// pegboard
# [plugin]
# name = "{name}"
{provides}# ///
from pydantic import BaseModel

class Options(BaseModel):
    level: int = 1
"""

OF_THE_PLUGIN = (
    "kv_allocator", "prefix_cache", "scheduler", "speculation_policy", "drafter", "executor",
    "observer", "logits_processor", "attention",
)  # fmt: skip

Values = dict[str, Any]


def other(**more: Any) -> Values:
    """The plugin of the test, by its name or with options."""
    return {"name": "other", **more}


DRAFTER = {"drafter": other()}
HIGHER = {"options": {"level": 2}}

ACTED_ON: dict[str, tuple[Values, Values]] = {
    "model": ({}, {"model": "{folder}/another"}),
    "tokenizer": ({}, {"tokenizer": "{folder}/words/tokenizer.json"}),
    "chat_template": ({}, {"chat_template": "{folder}/template.jinja"}),
    "generation_config": ({}, {"generation_config": "none"}),
    "dtype": ({}, {"dtype": "float64"}),
    "device": ({}, {"device": "cuda"}),
    "threads": ({"threads": 1}, {"threads": 2}),
    "max_model_len": ({}, {"max_model_len": 32}),
    "seed": ({}, {"seed": 1}),
    "kv_cache.allocator.name": ({}, {"kv_cache": {"allocator": other()}}),
    "kv_cache.allocator.options": (
        {"kv_cache": {"allocator": other()}},
        {"kv_cache": {"allocator": HIGHER}},
    ),
    "kv_cache.block_size": ({}, {"kv_cache": {"block_size": 32}}),
    "kv_cache.memory": ({}, {"kv_cache": {"memory": "2MiB"}}),
    "kv_cache.encoding": ({}, {"kv_cache": {"encoding": "int8"}}),
    "kv_cache.verify": ({"prefix_cache": other()}, {"kv_cache": {"verify": True}}),
    "prefix_cache.name": ({}, {"prefix_cache": other()}),
    "prefix_cache.options": ({"prefix_cache": other()}, {"prefix_cache": HIGHER}),
    "scheduler.name": ({}, {"scheduler": other()}),
    "scheduler.options": ({"scheduler": other()}, {"scheduler": HIGHER}),
    "scheduler.max_num_seqs": ({}, {"scheduler": {"max_num_seqs": 3}}),
    "scheduler.max_num_batched_tokens": ({}, {"scheduler": {"max_num_batched_tokens": 100}}),
    "scheduler.max_step_ms": ({}, {"scheduler": {"max_step_ms": 50}}),
    "attention.name": ({}, {"attention": other()}),
    "attention.options": ({"attention": other()}, {"attention": HIGHER}),
    "quantizer.name": ({}, {"quantizer": "w4"}),
    "quantizer.options": ({"quantizer": "w4"}, {"quantizer": {"options": {"embedding": True}}}),
    "kernels": ({}, {"kernels": "torch"}),
    "drafter.name": ({}, DRAFTER),
    "drafter.options": (DRAFTER, {"drafter": HIGHER}),
    "drafter.model": (DRAFTER, {"drafter": {"model": "{folder}/another"}}),
    "drafter.num_speculative_tokens": (DRAFTER, {"drafter": {"num_speculative_tokens": 2}}),
    "drafter.policy.name": (DRAFTER, {"drafter": {"policy": other()}}),
    "drafter.policy.options": (
        {"drafter": other(policy=other())},
        {"drafter": {"policy": HIGHER}},
    ),
    "drafter.verification": (DRAFTER, {"drafter": {"verification": "rejection"}}),
    "logits_processors.name": ({}, {"logits_processors": [other()]}),
    "logits_processors.options": (
        {"logits_processors": [other()]},
        {"logits_processors": [other(**HIGHER)]},
    ),
    "observers.name": ({}, {"observers": [other()]}),
    "observers.options": ({"observers": [other()]}, {"observers": [other(**HIGHER)]}),
    "executor.name": ({}, {"executor": other()}),
    "executor.depth": ({}, {"executor": {"depth": 2}}),
    "executor.options": ({"executor": other()}, {"executor": HIGHER}),
    "plugins.load": (
        {"scheduler": other(), "plugins": {"load": []}},
        {"plugins": {"load": ["{folder}/other.py"]}},
    ),
    "plugins.disable": ({}, {"plugins": {"disable": ["cpu"]}}),
    "plugins.replace": (
        {"scheduler": other(), "plugins": {"load": ["{folder}/other.py", "{folder}/rival.py"]}},
        {"plugins": {"replace": {"scheduler.other": "rival"}}},
    ),
    "server.served_model_name": ({}, {"server": {"served_model_name": "a name"}}),
}  # fmt: skip
"""Leaf to the settings that it stands beside, and those with its second value over them."""

REFUSED: dict[str, tuple[Values, Values]] = {
    "revision": ({}, {"revision": "main"}),
    "numerics": ({"dtype": "float64"}, {"numerics": "invariant"}),
    "executor.tensor_parallel": ({}, {"executor": {"tensor_parallel": 2}}),
    "executor.pipeline_parallel": ({}, {"executor": {"pipeline_parallel": 2}}),
    "kv_transfer.name": ({}, {"kv_transfer": "other"}),
    "kv_transfer.options": ({}, {"kv_transfer": {"name": "none", **HIGHER}}),
}
"""The same of leaves that nothing acts on yet, or not for this model."""

OF_THE_MACHINE = ("device",)
"""Leaves whose second value another machine would act on."""

SERVED = {
    "server.host", "server.port", "server.api_keys", "server.admin_keys", "server.allowed_hosts",
    "server.keep_alive_s", "server.max_connections", "server.log_requests",
    "server.silence_s", "server.deadline_s", "server.farewell_s",
}  # fmt: skip
"""Leaves of which a running server shows something, below, or in test_server_watch.py."""


def leaves() -> set[str]:
    keys = list(all_keys(Config))
    return {key for key in keys if not any(one.startswith(f"{key}.") for one in keys)}


def test_every_leaf_of_the_schema_is_walked() -> None:
    walked = ACTED_ON.keys() | REFUSED.keys() | SERVED
    limits = {leaf for leaf in leaves() if leaf.startswith("server.limits.")}
    assert leaves() - limits == walked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a tokenizer, a template, and two plugins that provide the same things."""
    folder = tmp_path_factory.mktemp("settings")
    model = write_tiny_model(folder / "model", tokenizer=True, num_hidden_layers=1)
    (model / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5}')
    write_tiny_model(folder / "another", seed=1, tokenizer=True, num_hidden_layers=1)
    write_tiny_model(folder / "mute", num_hidden_layers=1)
    write_tiny_tokenizer(folder / "words", kind="byte_fallback")
    (folder / "template.jinja").write_text("{{ messages[0]['content'] }}")
    for name in ("other", "rival"):
        provides = "".join(_entry(interface, name) for interface in OF_THE_PLUGIN)
        (folder / f"{name}.py").write_text(PLUGIN.format(name=name, provides=provides))
    return folder


def _entry(interface: str, plugin: str) -> str:
    version = max(CONTRACTS[interface].versions)
    promises = {"kv_allocator": '["sharing"]', "drafter": '["draft_model", "probabilities"]'}
    layout = 'layout = "pegboard.builtin.torch_attention_layout:layout"'
    lines = [
        "[[provides]]",
        f'interface = "{interface}"',
        f"version = {version}",
        'name = "other"',
        'summary = "Of the test"',
        'options = ":Options"',
        "priority = -1",
        f"promises = {promises.get(interface, '[]')}",
        *([layout] if interface == "attention" else []),
    ]
    return "".join(f"# {line}\n" for line in lines)


@pytest.fixture
def outcome(folder: Path) -> Any:
    """(settings, ...) -> what they come to, those of the last laid over the others."""

    def outcome(*layers: Values) -> tuple[bytes, ...] | tuple[str, ...]:
        settings: Values = {
            "model": "{folder}/model",
            "max_model_len": 64,
            "kv_cache": {"memory": "1MiB"},
            "plugins": {"load": ["{folder}/other.py"]},
        }
        for layer in layers:
            settings = overlay(settings, layer)
        try:
            prepared = prepare(Config.from_values(_filled(settings, str(folder))))
        except CompositionRefused as refusal:
            return refusal.reasons
        except UserError as refusal:
            return (str(refusal),)
        # Why something was chosen does not make it another choice.
        composition = msgspec.structs.replace(prepared.composition, decisions=())
        return msgspec.json.encode(composition), msgspec.json.encode(prepared.ledger)

    return outcome


def _filled(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, folder) for inner in value]
    return value.replace("{folder}", folder) if isinstance(value, str) else value


@pytest.mark.parametrize("leaf", [*ACTED_ON, *REFUSED])
def test_a_second_value_is_acted_on_or_refused_by_name(outcome: Any, leaf: str) -> None:
    beside, second = {**ACTED_ON, **REFUSED}[leaf]
    before, after = outcome(beside), outcome(beside, second)
    assert before != after
    if isinstance(after[0], str):
        key = leaf.removesuffix(".name")
        assert any(key in reason.replace("[0]", "") for reason in after), after
    if leaf not in OF_THE_MACHINE:
        assert isinstance(after[0], str) == (leaf in REFUSED), after
    assert leaf == "plugins.load" or leaf == "plugins.replace" or isinstance(before[0], bytes), (
        before
    )


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"tokenizer": "{folder}/words"}, "tokenizer"),
        ({"tokenizer": "{folder}/nowhere"}, "tokenizer"),
        ({"model": "{folder}/mute", "chat_template": "{folder}/template.jinja"}, "chat_template"),
    ],
)
def test_a_text_setting_without_effect_is_refused(outcome: Any, settings: Values, key: str) -> None:
    (reason,) = outcome(settings)
    assert reason.startswith(f"{key}: ")


def test_a_drafters_model_that_is_nowhere_is_refused(outcome: Any) -> None:
    (reason,) = outcome({"drafter": other(model="/does/not/exist")})
    assert reason.startswith("drafter.model: /does/not/exist: no such folder or file")


def test_a_seed_is_that_of_requests_without_one(folder: Path) -> None:
    def sampled(seed: int) -> tuple[int, ...]:
        with LLM(folder / "model", max_model_len=64, seed=seed) as llm:
            params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
            (result,) = llm.generate([[5, 6, 7]], params)
        return result.token_ids

    assert sampled(1) == sampled(1) != sampled(2)


LOOPBACK = "127.0.0.2"
"""Another address of the loopback device than the default's."""


@pytest.fixture(scope="module")
def served(serve: Any, folder: Path) -> Any:
    """A server with the second value of each setting that says how it is reached."""
    settings = {
        "host": LOOPBACK,
        "admin_keys": "admin",
        "allowed_hosts": "[box.example.org]",
        "keep_alive_s": 0,
        "max_connections": 7,
        "log_requests": "false",
    }
    sets = [f"--set=server.{key}={value}" for key, value in settings.items()]
    return serve(folder / "model", "--max-model-len", "64", *sets)


@pytest.fixture(scope="module")
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


def test_a_server_is_where_its_settings_say(served: Any, http: httpx.Client) -> None:
    address = httpx.URL(served.url)
    assert address.host == LOOPBACK
    assert address.port != Config(model="m").server.port  # 0: a free one
    assert "at most 7 connections" in served.log
    assert http.get("/live").headers["connection"] == "close"
    assert http.get("/metrics").status_code == 401
    admin = {"authorization": "Bearer admin"}
    assert http.get("/metrics", headers=admin).status_code == 200
    for host, status in (("box.example.org", 200), ("other.example.org", 403)):
        assert http.get("/v1/models", headers={"host": host}).status_code == status
    assert http.get("/v1/models/nothing").status_code == 404
    assert "/v1/models" not in served.log


def test_a_server_with_keys_asks_for_one(serve: Any, folder: Path) -> None:
    served = serve(folder / "model", "--max-model-len", "64", "--api-key", "user")
    with httpx.Client(base_url=served.url, timeout=60) as http:
        assert http.get("/v1/models").status_code == 401
        key = {"authorization": "Bearer user"}
        assert http.get("/v1/models", headers=key).status_code == 200
    assert "'/v1/models'" in served.log


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("--api-key", "user"), "with server.api_keys"),
        (("--host", "0.0.0.0"), "on 0.0.0.0"),
    ],
)
def test_names_that_no_request_is_held_to_are_refused(
    folder: Path, settings: tuple[str, ...], why: str
) -> None:
    names = ("--set", "server.allowed_hosts=[box.example.org]", "--port", "0")
    program = Path(sys.executable).with_name("serve")
    command = [str(program), str(folder / "model"), *settings, *names]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.startswith("error: server.allowed_hosts: ") and why in run.stderr


def test_settings_of_another_command_stand(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = ("--set", "server={port: 1, api_keys: user}", "--max-model-len", "64")
    asked = ("--prompt", "the dog", "--max-tokens", "1", "--json")
    assert main(["generate", str(folder / "model"), *others, *asked]) == 0
    assert json.loads(capsys.readouterr().out)["finish_reason"]
