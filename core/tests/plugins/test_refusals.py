"""A config that cannot run is refused before anything starts, and the refusal names what is at fault."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine, SamplingParams, errors
from pegboard.builtin.fcfs import FCFS
from pegboard.compose import prepare
from pegboard.config import Config
from pegboard.interfaces.scheduler import SchedulerContext
from pegboard.testing.tiny import write_tiny_model

Install = Callable[..., Path]
Configure = Callable[..., Config]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"scheduler": {"max_num_batched_tokens": 2**31 - 1}}, "max_num_batched_tokens"),
        ({"scheduler": {"max_num_seqs": 10**9}}, "max_num_seqs"),
        (
            {"scheduler": {"max_num_batched_tokens": 2**31 - 1}, "kv_cache": {"memory": 0.5}},
            "max_num_batched_tokens",
        ),
        ({"kv_cache": {"memory": "900000GiB"}}, "kv_cache.memory"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"threads": 1000}, "threads"),
    ],
)
def test_the_setting_at_fault_is_named(
    config_of: Configure, values: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    with pytest.raises(errors.CompositionRefused) as refusal:
        prepare(config_of(**values))
    assert len(refusal.value.reasons) == 1
    assert str(refusal.value).startswith((named, f"scheduler.{named}"))


def test_the_shortest_context_holds_a_token_of_each_kind(config_of: Configure) -> None:
    with Engine(config_of(max_model_len=2, threads=1)) as engine:
        engine.submit([1], SamplingParams(ignore_eos=True))
        tokens = [delta.token_ids for delta in engine.step()]
        assert [len(ids) for ids in tokens] == [1] and not engine.has_work()


LENIENT_MANIFEST = """
[plugin]
name = "{name}"

[[provides]]
interface = "scheduler"
version = 1
name = "lenient"
summary = "A scheduler of the test"
options = ":Options"
"""
LENIENT_CODE = """
from pydantic import BaseModel, ConfigDict
from pegboard import hookimpl
from pegboard.builtin.fcfs import FCFS

class Inner(BaseModel):
    depth: int = 1

class Options(BaseModel):
    model_config = ConfigDict(extra=%r)
    max_wait: float = 1.0
    inner: Inner = Inner()

@hookimpl
def pegboard_schedulers():
    return {"lenient": lambda context, options: FCFS(context)}
"""


def test_options_that_a_model_would_ignore_are_refused(
    install: Install, config_of: Configure
) -> None:
    install("lenient", manifest=LENIENT_MANIFEST, code=LENIENT_CODE % "ignore")

    def with_options(**options: Any) -> Config:
        return config_of(scheduler={"name": "lenient", "options": options})

    prepare(with_options(max_wait=2.0, inner={"depth": 2}))
    for options, path in (
        ({"max_wiat": 2.0}, "max_wiat"),
        ({"inner": {"dept": 2}}, r"inner\.dept"),
    ):
        with pytest.raises(errors.OptionsInvalid, match=rf"scheduler\.options\.{path}"):
            prepare(with_options(**options))


def test_a_model_that_takes_any_option_gets_it(install: Install, config_of: Configure) -> None:
    install("taking_any", manifest=LENIENT_MANIFEST, code=LENIENT_CODE % "allow")
    prepare(config_of(scheduler={"name": "lenient", "options": {"whatever": 2.0}}))


@pytest.mark.parametrize("name", ["FCFS", "hookimpl", "ConfigDict"])
def test_options_that_name_no_model(install: Install, config_of: Configure, name: str) -> None:
    manifest = LENIENT_MANIFEST.replace(":Options", f":{name}")
    install(f"naming_{name.lower()}", manifest=manifest, code=LENIENT_CODE % "ignore")
    with pytest.raises(errors.ManifestInvalid, match=rf"':{name}'.*BaseModel"):
        prepare(config_of(scheduler={"name": "lenient"}))


@pytest.mark.parametrize("manifest", [5, "name", ["name"], None, {5: "x"}, {"name": 5}])
def test_an_object_whose_manifest_is_none(config_of: Configure, manifest: Any) -> None:
    kind = type("Odd", (FCFS,), {"manifest": manifest})
    with pytest.raises(errors.ManifestInvalid, match="Odd"):
        prepare(config_of(), scheduler=kind(SchedulerContext(1, 8, 64)))


@pytest.mark.parametrize(
    ("values", "plugin"),
    [
        ({"scheduler": {"name": "one_by_one"}}, "sched"),
        ({"kernels": "torch"}, "builtin"),
        ({}, "builtin"),
    ],
)
def test_a_refusal_says_which_disabled_plugin_would_do(
    install: Install, config_of: Configure, values: dict[str, Any], plugin: str
) -> None:
    install("sched")
    config = config_of(plugins={"disable": [plugin]}, **values)
    with pytest.raises(errors.UserError, match=rf"disabled.*take {plugin}.*plugins\.disable"):
        prepare(config)


@pytest.mark.parametrize("known", ["roundoff", "roundoff/packed"])
def test_a_checkpoint_whose_method_nothing_reads_says_what_to_install(
    tmp_path: Path, config_of: Configure, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    method = {"quant_method": "roundoff", "format": "packed"}
    model = write_tiny_model(tmp_path / "model", quantization_config=method)
    monkeypatch.setattr(
        "pegboard.plugins.choice.suggestion",
        lambda interface, name: "pegboard-roundoff" if name == known else None,
    )
    with pytest.raises(errors.CompositionRefused) as caught:
        prepare(config_of(model=str(model)))
    (reason,) = caught.value.reasons
    assert "the checkpoint is quantized by roundoff/packed" in reason
    assert reason.endswith("fix: pip install pegboard-roundoff")


def test_every_reason_is_told_at_once(config_of: Configure) -> None:
    config = config_of(
        scheduler={"name": "nope"},
        attention="nope",
        numerics="invariant",
        executor={"name": "local", "tensor_parallel": 2},
    )
    with pytest.raises(errors.CompositionRefused) as caught:
        prepare(config)
    reasons = "\n".join(caught.value.reasons)
    for said in ("scheduler: no installed", "attention: no installed", "tensor_parallel", "linear"):
        assert said in reasons


def test_options_of_a_builtin_that_is_always_on(config_of: Configure) -> None:
    config = config_of(observers=[{"name": "metrics", "options": {"vllm_names": False}}])
    parts = {part.name: part for part in prepare(config).composition.observers}
    assert parts["metrics"].options == {"vllm_names": False}
    wrong = config_of(observers=[{"name": "metrics", "options": {"nonsense": 1}}])
    with pytest.raises(errors.OptionsInvalid, match=r"observers.*nonsense"):
        prepare(wrong)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kv_transfer": "anything"}, "moves no KV"),
        ({"kv_transfer": {"name": "none", "options": {"a": 1}}}, r"kv_transfer\.options"),
        ({"executor": {"tensor_parallel": 2}}, "no installed executor promises tensor_parallel"),
        ({"executor": {"pipeline_parallel": 2}}, "no installed executor promises pipeline_par"),
        ({"drafter": {"model": "x"}}, r"drafter\.model: x, but drafter 'none' guesses nothing"),
        ({"drafter": {"name": "none", "policy": "fixed"}}, r"drafter\.policy: fixed, but"),
        ({"drafter": {"num_speculative_tokens": 2}}, r"drafter\.num_speculative_tokens: 2, but"),
    ],
)
def test_what_would_be_inactive_is_refused(
    config_of: Configure, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.UserError, match=said):
        prepare(config_of(**values))
