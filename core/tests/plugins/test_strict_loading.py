"""Every way in which a plugin can be unusable is an error of its own kind: it names the plugin, its
distribution and version, where it lies, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from pegboard import Engine, errors
from pegboard.compose import build_engine, prepare
from pegboard.config import Config
from pegboard.plugins.listing import list_plugins

Install = Callable[..., Path]
Named = Callable[..., Config]
Kind = TypeVar("Kind", bound=errors.UserError)

HOOK = """
from pegboard import hookimpl

@hookimpl
def pegboard_schedulers():
    {body}
"""

OPTIONS_MANIFEST = """
[plugin]
name = "{name}"

[[provides]]
interface = "scheduler"
version = 1
name = "{provides}"
summary = "s"
options = "pegboard_{name}.options:Options"
"""


def refusal(kind: type[Kind], config: Config, *origins: Path) -> Kind:
    """The error with which an engine of the config does not start; one line, which names plugins
    by all that is known of them, and says what to do."""
    with pytest.raises(errors.UserError) as caught:
        build_engine(prepare(config))
    assert type(caught.value) is kind
    line = str(caught.value)
    for package in origins:
        plugin = package.name.removeprefix("pegboard_")
        assert plugin in line and f"pegboard-{plugin} 1.2.3, {package}" in line
    assert "\n" not in line
    assert "; fix: " in line or "; allowed: " in line
    return caught.value


def test_a_strangers_scheduler_is_chosen_by_name_and_serves(install: Install, named: Named) -> None:
    install("stranger")
    assert "pegboard_stranger" not in sys.modules
    with Engine(named()) as engine:
        engine.submit([1, 2, 3])
        assert "pegboard_stranger" in sys.modules
        while engine.has_work():
            engine.step()
        assert engine.prepared.composition.parts["scheduler"].origin.version == "1.2.3"


def test_a_plugin_that_nothing_names_is_not_imported(install: Install, config_of: Named) -> None:
    install("idle", code="raise RuntimeError('imported')", provides="idle")
    build_engine(prepare(config_of())).close()
    assert "pegboard_idle" not in sys.modules


def test_a_name_that_nothing_provides(named: Named) -> None:
    with pytest.raises(errors.PluginNotInstalled, match=r"scheduler: .*'nope'; installed: .*fcfs"):
        prepare(named("nope"))


def test_a_known_plugin_that_is_missing_says_what_to_install(
    named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pegboard.plugins.choice.suggestion", lambda *_: "pegboard-schedulers")
    error = refusal(errors.PluginNotInstalled, named("not-there"))
    assert str(error).endswith("fix: pip install pegboard-schedulers")


def test_no_manifest(install: Install, named: Named) -> None:
    package = install("bare", manifest="")
    listing = {plugin.name: plugin for plugin in list_plugins()}["bare"]
    assert listing.problem is not None and "plugin.toml" in listing.problem
    assert listing.origin == str(package)
    assert "plugin.toml" in str(refusal(errors.ManifestInvalid, named("bare"), package))


def test_a_broken_plugin_is_pointed_at_where_it_might_provide_the_name(
    install: Install, named: Named
) -> None:
    install("bare", manifest="")
    error = refusal(errors.PluginNotInstalled, named("something"))
    assert "fix: 'pegboard plugins' says why bare" in str(error)


def test_an_interface_version_that_is_not_accepted(install: Install, named: Named) -> None:
    package = install("late", manifest=OPTIONS_MANIFEST.replace("version = 1", "version = 99"))
    error = refusal(errors.InterfaceVersionRefused, named("late"), package)
    assert "written for version 99; allowed: 1" in str(error)


def test_a_checkpoint_whose_reader_is_broken(
    install: Install, config_of: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install("odd", manifest="[plugin\n")
    monkeypatch.setattr("pegboard.plugins.inspect.suggestion", lambda *_: "pegboard-odd")
    (tmp_path / "model.odd").touch()
    error = refusal(errors.ManifestInvalid, config_of(model=str(tmp_path / "model.odd")), package)
    assert "invalid manifest" in str(error)


def test_an_entry_point_to_a_module_that_is_not_there(install: Install, named: Named) -> None:
    install("gone", module="pegboard_{name}.elsewhere")
    with pytest.raises(errors.ManifestInvalid) as caught:
        prepare(named("gone"))
    line = str(caught.value)
    assert "pegboard-gone 1.2.3" in line and "pegboard_gone.elsewhere" in line
    assert line.endswith("fix: reinstall pegboard-gone")


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ("[plugin\n", "invalid manifest"),
        ('[plugin]\nname = "wrong"\n', "provides"),
        ('provides = []\n[plugin]\nname = "right"\n', "its name is 'right'"),
        (f"{OPTIONS_MANIFEST}require = {{}}\n", "unknown field `require`"),
        (OPTIONS_MANIFEST.replace("scheduler", "schedule"), "unknown interface 'schedule'"),
        (
            OPTIONS_MANIFEST.replace('scheduler"\nversion = 1', 'attention"\nversion = 0'),
            "lacks layout",
        ),
        (OPTIONS_MANIFEST.replace("version = 1", "version = 99"), "written for version 99"),
    ],
)
def test_an_invalid_manifest_is_a_line_in_the_list_and_stops_nothing(
    install: Install, config_of: Named, named: Named, manifest: str, said: str
) -> None:
    package = install("wrong", manifest=manifest)
    problem = {plugin.name: plugin for plugin in list_plugins()}["wrong"].problem
    assert problem is not None and said in problem and "\n" not in problem
    prepare(config_of())
    kind = errors.InterfaceVersionRefused if "99" in said else errors.ManifestInvalid
    assert said in str(refusal(kind, named("wrong"), package))


def test_an_import_that_fails_shows_the_original(install: Install, named: Named) -> None:
    package = install("boom", code="import a_module_that_is_missing")
    error = refusal(errors.PluginImportFailed, named(), package)
    assert "No module named 'a_module_that_is_missing'" in str(error)
    assert isinstance(error.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "def", "1 / 0"])
def test_an_import_cannot_end_the_process(install: Install, named: Named, code: str) -> None:
    package = install("ends", code=code)
    refusal(errors.PluginImportFailed, named(), package)


def test_a_misspelt_hook(install: Install, named: Named) -> None:
    code = HOOK.replace("schedulers", "schedular").replace("{body}", "return {}")
    package = install("typo", code=code)
    error = refusal(errors.UnknownHook, named(), package)
    assert "pegboard_schedular" in str(error) and "pegboard_schedulers" in error.allowed


def test_a_hook_with_a_wrong_signature(install: Install, named: Named) -> None:
    code = HOOK.replace("()", "(engine)").replace("{body}", "return {}")
    package = install("sig", code=code)
    assert "engine" in str(refusal(errors.HookSignatureWrong, named(), package))


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("empty", "return {}", "no hook provides: scheduler 'one_by_one'"),
        ("more", "return {'{provides}': int, 'hidden': int}", "does not name: scheduler 'hidden'"),
        ("listing", "return ['x']", "mapping of names"),
        ("by_number", "return {5: int}", "mapping of names"),
        ("by_none", "return {None: int}", "mapping of names"),
        ("by_tuple", "return {('one_by_one',): int}", "mapping of names"),
    ],
)
def test_hooks_that_do_not_provide_what_the_manifest_promises(
    install: Install, named: Named, name: str, body: str, said: str
) -> None:
    package = install(name, code=HOOK.replace("{body}", body))
    assert said in str(refusal(errors.ManifestHookMismatch, named(), package))


def test_two_plugins_with_one_name_are_settled_only_by_replace(
    install: Install, named: Named
) -> None:
    packages = [install(name, provides="same") for name in ("first", "second")]
    error = refusal(errors.DuplicateName, named("same"), *packages)
    both = "{scheduler.same: first} or {scheduler.same: second}"
    assert str(error).endswith(f"fix: plugins.replace: {both}")
    for name in ("first", "second"):
        config = named("same", plugins={"replace": {"scheduler.same": name}})
        assert prepare(config).composition.parts["scheduler"].origin.plugin == name


def test_a_builtin_can_be_replaced(install: Install, config_of: Named) -> None:
    install("mine", provides="fcfs")
    config = config_of(plugins={"replace": {"scheduler.fcfs": "mine"}})
    assert prepare(config).composition.parts["scheduler"].origin.plugin == "mine"


def test_options_that_do_not_fit_name_their_whole_path(install: Install, config_of: Named) -> None:
    options = """
    from pydantic import BaseModel

    class Options(BaseModel, extra="forbid"):
        max_wait: float = 1.0
    """
    package = install("opt", manifest=OPTIONS_MANIFEST, options=options)
    for given in ({"max_wait": "long"}, {"max_wiat": 1.0}):
        config = config_of(scheduler={"name": "one_by_one", "options": given})
        error = refusal(errors.OptionsInvalid, config, package)
        assert str(error).startswith(f"scheduler.options.{next(iter(given))}: ")
        assert str(error).endswith("; allowed: max_wait")


@pytest.mark.parametrize(
    ("name", "module"),
    [("lacking", ""), ("raising", "1 / 0"), ("needing", "import a_module_that_is_missing")],
)
def test_an_options_model_that_cannot_be_had(
    install: Install, named: Named, name: str, module: str
) -> None:
    package = install(name, manifest=OPTIONS_MANIFEST, options=module)
    error = refusal(errors.PluginImportFailed, named(), package)
    assert f"'pegboard_{name}.options:Options'" in str(error)
    assert error.__cause__ is not None


def test_options_for_a_part_that_takes_none(install: Install, config_of: Named) -> None:
    package = install("optionless")
    given = {"name": "one_by_one", "options": {"speed": 11}}
    error = refusal(errors.OptionsInvalid, config_of(scheduler=given), package)
    assert str(error).endswith("fix: leave out scheduler.options")


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("dividing", "return 1 / 0", "ZeroDivisionError"),
        ("raises", "return {'{provides}': lambda context: 1 / 0}", "ZeroDivisionError"),
        (
            "leaving",
            "import sys; return {'{provides}': lambda context: sys.exit(3)}",
            "SystemExit: 3",
        ),
    ],
)
def test_a_hook_or_a_factory_that_raises(
    install: Install, named: Named, name: str, body: str, said: str
) -> None:
    package = install(name, code=HOOK.replace("{body}", body))
    error = refusal(errors.FactoryFailed, named(), package)
    assert said in str(error)
    assert isinstance(error.__cause__, (ZeroDivisionError, SystemExit))


def test_an_object_that_is_no_scheduler(install: Install, named: Named) -> None:
    body = "return {'{provides}': lambda context: object()}"
    package = install("shape", code=HOOK.replace("{body}", body))
    error = refusal(errors.InterfaceNotSatisfied, named(), package)
    assert "is an object of object without plan" in str(error)
    assert "pegboard.interfaces.scheduler.Scheduler" in error.allowed


def test_a_plugin_that_does_not_come_back_is_named_in_the_log(
    install: Install,
    named: Named,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("pegboard.plugins.guard.SLOW_S", 0.05)
    slow = "import time; time.sleep(0.5)\nfrom pegboard.builtin.fcfs import FCFS\n"
    package = install("sleepy", code=slow + HOOK.replace("{body}", "return {'{provides}': FCFS}"))
    build_engine(prepare(named())).close()
    (told,) = [record.getMessage() for record in caplog.records if "sleepy" in record.getMessage()]
    assert told.startswith("plugin 'sleepy' (pegboard-sleepy 1.2.3, ") and "import" in told
    assert str(package) in told
