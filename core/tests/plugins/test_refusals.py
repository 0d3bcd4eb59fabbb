"""What cannot run is refused before anything starts, and the refusal names what is at fault."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine, SamplingParams, errors
from pegboard.builtin.fcfs import FCFS
from pegboard.compose import build_engine, prepare
from pegboard.config import Config
from pegboard.interfaces.scheduler import SchedulerContext

Install = Callable[..., Path]


def config_of(model: Path, **values: Any) -> Config:
    return Config.from_values(
        {"model": str(model), "kv_cache": {"memory": "8MiB"}, "max_model_len": 64, **values}
    )


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
    tiny_model: Path, values: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    with pytest.raises(errors.CompositionRefused) as refusal:
        prepare(config_of(tiny_model, **values))
    assert len(refusal.value.reasons) == 1
    assert str(refusal.value).startswith((named, f"scheduler.{named}"))


def test_the_shortest_context_holds_a_token_of_each_kind(tiny_model: Path) -> None:
    with Engine(config_of(tiny_model, max_model_len=2, threads=1)) as engine:
        engine.submit([1], SamplingParams(ignore_eos=True))
        tokens = [delta.token_ids for delta in engine.step()]
        assert [len(ids) for ids in tokens] == [1] and not engine.has_work()


LENIENT_MANIFEST = """
[plugin]
name = "{name}"

[[provides]]
interface = "scheduler"
version = 0
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


def test_options_that_a_model_would_ignore_are_refused(install: Install, tiny_model: Path) -> None:
    install("lenient", manifest=LENIENT_MANIFEST, code=LENIENT_CODE % "ignore")

    def with_options(**options: Any) -> Config:
        return config_of(tiny_model, scheduler={"name": "lenient", "options": options})

    prepare(with_options(max_wait=2.0, inner={"depth": 2}))
    for options, path in (
        ({"max_wiat": 2.0}, "max_wiat"),
        ({"inner": {"dept": 2}}, r"inner\.dept"),
    ):
        with pytest.raises(errors.OptionsInvalid, match=rf"scheduler\.options\.{path}"):
            prepare(with_options(**options))


def test_a_model_that_takes_any_option_gets_it(install: Install, tiny_model: Path) -> None:
    install("taking_any", manifest=LENIENT_MANIFEST, code=LENIENT_CODE % "allow")
    prepare(config_of(tiny_model, scheduler={"name": "lenient", "options": {"whatever": 2.0}}))


@pytest.mark.parametrize("name", ["FCFS", "hookimpl", "ConfigDict"])
def test_options_that_name_no_model(install: Install, tiny_model: Path, name: str) -> None:
    manifest = LENIENT_MANIFEST.replace(":Options", f":{name}")
    install(f"naming_{name.lower()}", manifest=manifest, code=LENIENT_CODE % "ignore")
    with pytest.raises(errors.ManifestInvalid, match=rf"':{name}'.*BaseModel"):
        prepare(config_of(tiny_model, scheduler={"name": "lenient"}))


@pytest.mark.parametrize(
    ("name", "key"), [("by_number", "5"), ("by_none", "None"), ("by_tuple", "('one_by_one',)")]
)
def test_a_hook_that_returns_other_than_names(
    install: Install, tiny_model: Path, name: str, key: str
) -> None:
    code = f"""
from pegboard import hookimpl

@hookimpl
def pegboard_schedulers():
    return dict([({key}, int)])
"""
    install(name, code=code)
    with pytest.raises(errors.ManifestHookMismatch, match="mapping of names"):
        build_engine(prepare(config_of(tiny_model, scheduler={"name": "one_by_one"})))


def test_a_factory_or_a_hook_cannot_end_the_process(install: Install, tiny_model: Path) -> None:
    code = """
import sys
from pegboard import hookimpl

@hookimpl
def pegboard_schedulers():
    return {{"one_by_one": lambda context: sys.exit(3)}}
"""
    install("leaving", code=code)
    with pytest.raises(errors.FactoryFailed, match="SystemExit: 3"):
        build_engine(prepare(config_of(tiny_model, scheduler={"name": "one_by_one"})))


@pytest.mark.parametrize("manifest", [5, "name", ["name"], None, {5: "x"}, {"name": 5}])
def test_an_object_whose_manifest_is_none(tiny_model: Path, manifest: Any) -> None:
    kind = type("Odd", (FCFS,), {"manifest": manifest})
    with pytest.raises(errors.ManifestInvalid, match="Odd"):
        prepare(config_of(tiny_model), scheduler=kind(SchedulerContext(1, 8, 64)))


@pytest.mark.parametrize(
    ("values", "plugin"),
    [
        ({"scheduler": {"name": "one_by_one"}}, "sched"),
        ({"kernels": "torch"}, "builtin"),
        ({}, "builtin"),
    ],
)
def test_a_refusal_says_which_disabled_plugin_would_do(
    install: Install, tiny_model: Path, values: dict[str, Any], plugin: str
) -> None:
    install("sched")
    config = config_of(tiny_model, plugins={"disable": [plugin]}, **values)
    with pytest.raises(errors.UserError, match=rf"disabled.*take {plugin}.*plugins\.disable"):
        prepare(config)
