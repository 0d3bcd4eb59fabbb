"""Plugins that are broken in ways that only loading shows: `--load` finds them before anybody serves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pegboard.cli import main
from pegboard.config import Config
from pegboard.plugins.contracts import CONTRACTS
from pegboard.plugins.listing import list_plugins

Configure = Callable[..., Config]

FILE = """
# /// pegboard
# [plugin]
# name = "{name}"
# [[provides]]
# interface = "{interface}"
# version = {version}
# name = "{name}"
# summary = "Of the test"
{fields}# ///
{code}
"""

GOOD = """
from pegboard import hookimpl
from pegboard.interfaces.scheduler import Scheduler

class Mine(Scheduler):
    def plan(self, queue, step):
        for seq in [*queue.running, *queue.waiting]:
            step.add(seq, seq.num_pending)

@hookimpl
def pegboard_schedulers():
    return {"{name}": lambda *given: Mine()}
"""


def hook(returned: str, interface: str = "scheduler", before: str = "") -> str:
    return (
        f"from pegboard import hookimpl\n{before}\n"
        f"@hookimpl\ndef pegboard_{interface}s():\n    return {returned}\n"
    )


def factory(made: str, **more: Any) -> str:
    return hook("{'{name}': lambda *given: " + made + "}", **more)


SELF_TEST = """
from pegboard.interfaces.kernel import SiluMulKernel

class Wrong(SiluMulKernel):
    def self_test(self):
        raise ValueError("2 is not 3")
    def silu_mul(self, gate, up):
        return gate
"""
MODEL = """
from pydantic import BaseModel, field_validator

class Options(BaseModel, validate_default=True):
    wait: float = 1.0
    @field_validator("wait")
    @classmethod
    def read(cls, value):
        return {}[value]
"""
EXIT, SILU = "import os; os._exit(0)", 'operations = [{ operation = "silu_mul" }]'
LAYOUT = 'layout = ":layout"'

# name: code, what is said of it, and what is not as a scheduler's manifest has it.
BROKEN: dict[str, tuple[str, str] | tuple[str, str, dict[str, Any]]] = {
    "raises": ("1 / 0", "PluginImportFailed.*ZeroDivisionError"),
    "syntax": ("def", "PluginImportFailed.*SyntaxError"),
    "lacking": ("import no_such_module", "PluginImportFailed.*no_such_module"),
    "leaves": ("raise SystemExit(0)", "PluginImportFailed.*SystemExit"),
    "apart": ("class A(BaseException): pass\nraise A", "PluginImportFailed.*: A"),
    "ends": (EXIT, "PluginFailed.*import: ended the process with status 0"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "PluginFailed.*import: .*SIGSEGV"),
    "hangs": ("import time; time.sleep(1000)", "PluginFailed.*import: took more than 12 s"),
    "endless": (
        "import sys\nwhile True: sys.stderr.write('endless' * 9999)",
        "PluginImportFailed.*OSError.*too large",
    ),
    "misspelt": (GOOD.replace("_schedulers", "_schedular"), "UnknownHook.*pegboard_schedular"),
    "argument": (GOOD.replace("lers():", "lers(engine):"), "HookSignatureWrong.*engine"),
    "hookless": ("", "ManifestHookMismatch.*no hook provides: scheduler 'hookless'"),
    "none": (hook("None"), "ManifestHookMismatch.*no hook provides"),
    "list": (hook("['list']"), "ManifestHookMismatch.*list"),
    "raising": (hook("1 / 0"), "FactoryFailed.*its hook pegboard_schedulers.*ZeroDivisionError"),
    "value": (hook("{'{name}': 5}"), "ManifestHookMismatch.*5"),
    "other": (hook("{'another': int}"), "ManifestHookMismatch.*'other'"),
    "made": (factory("1 / 0"), "FactoryFailed.*making scheduler 'made'.*ZeroDivisionError"),
    "deep": (
        hook("{'{name}': deep}", before="def deep(*given): deep()"),
        "FactoryFailed.*RecursionError",
    ),
    "quits": (factory("exit(3)"), "FactoryFailed.*SystemExit: 3"),
    "contextless": (hook("{'{name}': lambda: 5}"), "FactoryFailed.*TypeError"),
    "nothing": (factory("None"), "InterfaceNotSatisfied.*NoneType without plan"),
    "class": (factory("int"), "InterfaceNotSatisfied.*type without plan"),
    "abstract": (
        factory("S()", before="from pegboard.interfaces.scheduler import Scheduler as S"),
        "FactoryFailed.*abstract",
    ),
    "later": (factory("__import__('os')._exit(7)"), "PluginFailed.*making scheduler.*status 7"),
    "modelless": (GOOD, "PluginImportFailed.*':Options'", {"fields": 'options = ":Options"'}),
    "model": (GOOD, "ManifestInvalid.*':Mine'.*BaseModel", {"fields": 'options = ":Mine"'}),
    "validator": (
        MODEL + GOOD,
        "ManifestFunctionFailed.*':Options'.*KeyError",
        {"fields": 'options = ":Options"'},
    ),
    "estimate": (GOOD, "PluginImportFailed.*':bytes_of'", {"fields": 'estimate = ":bytes_of"'}),
    "constant": (
        "bytes_of = 5" + GOOD,
        "ManifestFunctionFailed.*5",
        {"fields": 'estimate = ":bytes_of"'},
    ),
    "layout": (
        factory("None", interface="attention_backend", before="def layout(group): return group.x"),
        "ManifestFunctionFailed.*layout.*AttributeError",
        {"interface": "attention", "fields": LAYOUT},
    ),
    "self_test": (
        factory("Wrong()", interface="kernel", before=SELF_TEST),
        "FactoryFailed.*self-test.*2 is not 3",
        {"interface": "kernel", "fields": SILU},
    ),
    "observer": (
        factory("object()", interface="observer"),
        "InterfaceNotSatisfied.*without close, observe",
        {"interface": "observer"},
    ),
    "command": (
        hook("{'{name}': lambda: 5}", interface="command"),
        "FactoryFailed.*making command 'command'",
        {"interface": "command"},
    ),
}


def write(folder: Path, name: str, code: str, **manifest: Any) -> Path:
    """A single-file plugin."""
    said = {"interface": "scheduler", "fields": "", **manifest}
    (said["version"],) = CONTRACTS[said["interface"]].versions
    if said["fields"]:
        said["fields"] = f"# {said['fields']}\n"
    file = folder / f"{name}.py"
    text = FILE.lstrip().replace("{code}", code)
    for key, value in {"name": name, **said}.items():
        text = text.replace(f"{{{key}}}", str(value))
    file.write_text(text)
    return file


QUICK = ("raises", "ends", "misspelt", "made", "nothing", "validator", "layout", "self_test")
"""One of each step of a trial; each is a process of its own."""

Loaded = dict[str, dict[str, Any]]


def load(folder: Path, names: Iterable[str]) -> Loaded:
    """The answer of `pegboard plugins --load` on some of `BROKEN`, and on one that is not."""
    files = [write(folder, "good", GOOD)]
    for name in names:
        code, _, *manifest = BROKEN[name]
        files.append(write(folder, name, code, **(manifest[0] if manifest else {})))
    config = folder / "config.yaml"
    others = [plugin.name for plugin in list_plugins() if plugin.name != "builtin"]
    plugins = {"load": [str(file) for file in files], "disable": sorted(set(others))}
    config.write_text(yaml.safe_dump({"model": "none", "plugins": plugins}))
    with pytest.MonkeyPatch.context() as patch, open(folder / "out", "w") as out:
        patch.setattr("sys.stdout", out)
        arguments = ["plugins", "--load", "--load-limit", "12", "--json", "--config", str(config)]
        assert main(arguments) == 2
    listed = json.loads((folder / "out").read_text())
    return {plugin["name"]: plugin for plugin in listed}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(tmp_path_factory.mktemp("plugins"), QUICK)


@pytest.fixture(scope="module")
def all_loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(tmp_path_factory.mktemp("plugins"), BROKEN)


@pytest.mark.parametrize("name", QUICK)
def test_a_broken_plugin_is_found_by_loading_it(loaded: Loaded, name: str) -> None:
    check_that_loading_finds(loaded, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_plugin_is_found_by_loading_it(all_loaded: Loaded, name: str) -> None:
    check_that_loading_finds(all_loaded, name)


def check_that_loading_finds(loaded: Loaded, name: str) -> None:
    (fault,) = loaded[name]["faults"]
    assert re.search(BROKEN[name][1], fault), fault
    assert f"plugin {name!r} (file, " in fault and "\n" not in fault
    assert loaded[name]["problem"] is None, "a manifest alone does not show it"


def test_what_works_has_no_faults(loaded: Loaded) -> None:
    assert loaded["good"]["faults"] == [] == loaded["good"]["not_made"]
    assert loaded["builtin"]["faults"] == []
    assert all("needs a checkpoint" in line for line in loaded["builtin"]["not_made"])


FLAWED_QUANTIZER = """
from pegboard import hookimpl
from pegboard.builtin.unquantized_plan import parameters, resident_bytes

def make(context):
    raise KeyError("group_size")

@hookimpl
def pegboard_quantizers():
    return {"flawed": make}
"""


@pytest.mark.parametrize(
    ("interface", "code", "manifest", "said"),
    [
        ("scheduler", factory("1 / 0"), {}, "making scheduler 'flawed'"),
        pytest.param(
            "quantizer",
            FLAWED_QUANTIZER,
            {
                "version": 2,
                "fields": 'methods = ["none"]\n# formats = ["float"]\n'
                '# parameters = ":parameters"\n# resident_bytes = ":resident_bytes"',
            },
            "making quantizer 'flawed'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_check_makes_all_parts_of_a_composition(
    tmp_path: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    interface: str,
    code: str,
    manifest: dict[str, Any],
    said: str,
) -> None:
    file = write(tmp_path, "flawed", code, interface=interface, **manifest)
    arguments = ["check", str(tiny_model), "--max-model-len", "64", "--dtype", "float64"]
    arguments += ["--set", f"plugins.load=[{file}]", "--set", f"{interface}=flawed"]
    assert main(arguments) == 0
    capsys.readouterr()
    monkeypatch.setenv("PEGBOARD_RAISE", "1")
    if interface == "quantizer":
        assert main([*arguments, "--load", "--json"]) == 2
        assert said in json.loads(capsys.readouterr().out)["refusals"][0]
        return
    assert main([*arguments, "--load"]) == 2
    captured = capsys.readouterr()
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("error: FactoryFailed: plugin 'flawed' (file, ") and said in last
    assert "Traceback" in captured.err and captured.out == ""


def test_check_loads_what_is_whole(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", str(tiny_model), "--max-model-len", "64", "--dtype", "float64"]
    assert main([*arguments, "--load"]) == 0
    assert "fcfs" in capsys.readouterr().out
