"""Every way in which a plugin can be unusable is an error of its own kind that says what to do."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pegboard import Engine, errors
from pegboard.compose import build_engine, prepare
from pegboard.config import Config
from pegboard.plugins.listing import list_plugins

Install = Callable[..., Path]


def config_of(model: Path, **values: Any) -> Config:
    return Config.from_values(
        {"model": str(model), "kv_cache": {"memory": "8MiB"}, "max_model_len": 64, **values}
    )


def named(model: Path, name: str = "one_by_one", **values: Any) -> Config:
    return config_of(model, scheduler={"name": name}, **values)


def test_a_strangers_scheduler_is_chosen_by_name_and_serves(
    install: Install, tiny_model: Path
) -> None:
    install("sched")
    with Engine(named(tiny_model)) as engine:
        engine.submit([1, 2, 3])
        assert "pegboard_sched" in sys.modules
        while engine.has_work():
            engine.step()
        assert engine.prepared.composition.parts["scheduler"].origin.version == "1.2.3"


def test_a_plugin_that_nothing_names_is_not_imported(install: Install, tiny_model: Path) -> None:
    install("idle", code="raise RuntimeError('imported')", provides="idle")
    build_engine(prepare(config_of(tiny_model))).close()
    assert "pegboard_idle" not in sys.modules


def test_a_name_that_nothing_provides(tiny_model: Path) -> None:
    with pytest.raises(errors.PluginNotInstalled, match=r"installed: fcfs"):
        prepare(named(tiny_model, "nope"))


def test_a_known_plugin_that_is_missing_says_what_to_install(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pegboard.plugins.choice.suggestion", lambda *_: "pegboard-schedulers")
    with pytest.raises(errors.PluginNotInstalled, match="pip install pegboard-schedulers"):
        prepare(named(tiny_model, "priority"))


def test_no_manifest(install: Install, tiny_model: Path) -> None:
    package = install("bare", manifest="")
    listing = {plugin.name: plugin for plugin in list_plugins()}["bare"]
    assert listing.problem is not None and "plugin.toml" in listing.problem
    assert str(package) in listing.origin
    with pytest.raises(errors.ManifestInvalid, match=r"bare.*1\.2\.3.*plugin\.toml"):
        prepare(named(tiny_model, "bare"))


def test_a_broken_plugin_is_pointed_at_where_it_might_provide_the_name(
    install: Install, tiny_model: Path
) -> None:
    install("bare", manifest="")
    with pytest.raises(errors.PluginNotInstalled, match=r"'pegboard plugins' says why bare"):
        prepare(named(tiny_model, "something"))


def test_an_interface_version_that_is_not_accepted(install: Install, tiny_model: Path) -> None:
    install("late", manifest=OPTIONS_MANIFEST.replace("version = 0", "version = 99"))
    with pytest.raises(errors.InterfaceVersionRefused, match=r"late 1\.2\.3.*99; allowed: \d"):
        prepare(named(tiny_model, "late"))


def test_a_checkpoint_whose_reader_is_broken(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("odd", manifest="[plugin\n")
    monkeypatch.setattr("pegboard.plugins.inspect.suggestion", lambda *_: "pegboard-odd")
    (tmp_path / "model.odd").touch()
    with pytest.raises(errors.ManifestInvalid, match=r"pegboard-odd 1\.2\.3.*invalid manifest"):
        prepare(config_of(tmp_path / "model.odd"))


def test_an_entry_point_to_a_module_that_is_gone(install: Install, tiny_model: Path) -> None:
    package = install("gone")
    shutil.rmtree(package)
    with pytest.raises(errors.ManifestInvalid, match=r"pegboard_gone.*reinstall pegboard-gone"):
        prepare(named(tiny_model, "gone"))


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ("[plugin\n", "invalid manifest"),
        ('[plugin]\nname = "wrong"\n', "provides"),
        (
            '[plugin]\nname="wrong"\n[[provides]]\ninterface="scheduler"\nversion=0\nname="a"\n'
            'summary="s"\nrequire={}\n',
            "unknown field `require`",
        ),
        (
            '[plugin]\nname="wrong"\n[[provides]]\ninterface="schedule"\nversion=0\nname="a"\n'
            'summary="s"\n',
            "unknown interface 'schedule'",
        ),
        (
            '[plugin]\nname="wrong"\n[[provides]]\ninterface="attention"\nversion=0\nname="a"\n'
            'summary="s"\n',
            "lacks layout",
        ),
        (
            '[plugin]\nname="wrong"\n[[provides]]\ninterface="scheduler"\nversion=99\nname="a"\n'
            'summary="s"\n',
            "written for version 99",
        ),
    ],
)
def test_an_invalid_manifest_is_a_line_in_the_list_and_stops_nothing(
    install: Install, tiny_model: Path, manifest: str, said: str
) -> None:
    install("wrong", manifest=manifest)
    problem = {plugin.name: plugin for plugin in list_plugins()}["wrong"].problem
    assert problem is not None and said in problem and "\n" not in problem
    prepare(config_of(tiny_model))


def test_an_import_that_fails_shows_the_original(install: Install, tiny_model: Path) -> None:
    install("boom", code="import a_module_that_is_missing")
    with pytest.raises(errors.PluginImportFailed, match=r"pegboard-boom 1\.2\.3") as caught:
        build_engine(prepare(named(tiny_model)))
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "def", "1 / 0"])
def test_an_import_cannot_end_the_process(install: Install, tiny_model: Path, code: str) -> None:
    install("ends", code=code)
    with pytest.raises(errors.PluginImportFailed, match=r"pegboard-ends 1\.2\.3"):
        build_engine(prepare(named(tiny_model)))


def test_a_misspelt_hook(install: Install, tiny_model: Path) -> None:
    code = "from pegboard import hookimpl\n\n@hookimpl\ndef pegboard_schedular():\n    return {}\n"
    install("typo", code=code)
    with pytest.raises(errors.UnknownHook, match="pegboard_schedular"):
        build_engine(prepare(named(tiny_model)))


def test_a_hook_with_a_wrong_signature(install: Install, tiny_model: Path) -> None:
    code = "from pegboard import hookimpl\n\n@hookimpl\ndef pegboard_schedulers(engine):\n    return {}\n"
    install("sig", code=code)
    with pytest.raises(errors.HookSignatureWrong, match="engine"):
        build_engine(prepare(named(tiny_model)))


def test_a_manifest_that_promises_what_no_hook_provides(install: Install, tiny_model: Path) -> None:
    code = "from pegboard import hookimpl\n\n@hookimpl\ndef pegboard_schedulers():\n    return {}\n"
    install("empty", code=code)
    with pytest.raises(errors.ManifestHookMismatch, match="scheduler 'one_by_one'"):
        build_engine(prepare(named(tiny_model)))


def test_a_hook_that_provides_what_the_manifest_does_not_name(
    install: Install, tiny_model: Path
) -> None:
    code = """
    from pegboard import hookimpl

    @hookimpl
    def pegboard_schedulers():
        return {{"{provides}": object, "hidden": object}}
    """
    install("more", code=code)
    with pytest.raises(errors.ManifestHookMismatch, match="scheduler 'hidden'"):
        build_engine(prepare(named(tiny_model)))


@pytest.mark.parametrize(
    ("name", "body", "kind"),
    [
        ("listing", "return ['x']", errors.ManifestHookMismatch),
        ("dividing", "return 1 / 0", errors.FactoryFailed),
    ],
)
def test_a_hook_that_returns_no_mapping(
    install: Install, tiny_model: Path, name: str, body: str, kind: type[errors.PluginError]
) -> None:
    code = f"from pegboard import hookimpl\n\n@hookimpl\ndef pegboard_schedulers():\n    {body}\n"
    install(name, code=code)
    with pytest.raises(kind, match=rf"pegboard-{name} 1\.2\.3"):
        build_engine(prepare(named(tiny_model)))


def test_two_plugins_with_one_name_are_settled_only_by_replace(
    install: Install, tiny_model: Path
) -> None:
    install("first", provides="same")
    install("second", provides="same")
    with pytest.raises(errors.DuplicateName, match=r"first.*second.*plugins\.replace"):
        prepare(named(tiny_model, "same"))
    replace = {"plugins": {"replace": {"scheduler.same": "second"}}}
    composition = prepare(named(tiny_model, "same", **replace)).composition
    assert composition.parts["scheduler"].origin.plugin == "second"


def test_a_builtin_can_be_replaced(install: Install, tiny_model: Path) -> None:
    install("mine", provides="fcfs")
    replace = {"plugins": {"replace": {"scheduler.fcfs": "mine"}}}
    composition = prepare(config_of(tiny_model, **replace)).composition
    assert composition.parts["scheduler"].origin.plugin == "mine"


OPTIONS_MANIFEST = """
[plugin]
name = "{name}"

[[provides]]
interface = "scheduler"
version = 0
name = "{provides}"
summary = "s"
options = "pegboard_{name}.options:Options"
"""


def test_options_that_do_not_fit_name_their_whole_path(install: Install, tiny_model: Path) -> None:
    package = install("opt", manifest=OPTIONS_MANIFEST)
    (package / "options.py").write_text(
        "from pydantic import BaseModel\n\nclass Options(BaseModel, extra='forbid'):\n"
        "    max_wait: float = 1.0\n"
    )
    config = config_of(
        tiny_model, scheduler={"name": "one_by_one", "options": {"max_wait": "long"}}
    )
    with pytest.raises(errors.OptionsInvalid, match=r"scheduler\.options\.max_wait"):
        prepare(config)


@pytest.mark.parametrize(
    ("name", "module"),
    [("lacking", ""), ("raising", "1 / 0"), ("needing", "import a_module_that_is_missing")],
)
def test_an_options_model_that_cannot_be_had(
    install: Install, tiny_model: Path, name: str, module: str
) -> None:
    package = install(name, manifest=OPTIONS_MANIFEST)
    (package / "options.py").write_text(module)
    with pytest.raises(errors.PluginImportFailed, match=rf"pegboard_{name}\.options:Options"):
        prepare(named(tiny_model))


def test_options_for_a_part_that_takes_none(tiny_model: Path) -> None:
    config = config_of(tiny_model, scheduler={"name": "fcfs", "options": {"speed": 11}})
    with pytest.raises(errors.OptionsInvalid, match=r"scheduler\.options"):
        prepare(config)


def test_a_factory_that_raises(install: Install, tiny_model: Path) -> None:
    code = """
    from pegboard import hookimpl

    def make(context):
        raise ZeroDivisionError("by zero")

    @hookimpl
    def pegboard_schedulers():
        return {{"{provides}": make}}
    """
    install("raises", code=code)
    with pytest.raises(errors.FactoryFailed, match="ZeroDivisionError: by zero"):
        build_engine(prepare(named(tiny_model)))


def test_an_object_that_is_no_scheduler(install: Install, tiny_model: Path) -> None:
    code = """
    from pegboard import hookimpl

    @hookimpl
    def pegboard_schedulers():
        return {{"{provides}": lambda context: object()}}
    """
    install("shape", code=code)
    with pytest.raises(errors.InterfaceNotSatisfied, match="without plan"):
        build_engine(prepare(named(tiny_model)))


def test_every_reason_is_told_at_once(tiny_model: Path) -> None:
    config = config_of(
        tiny_model,
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


SINGLE_FILE = """# /// pegboard
# [plugin]
# name = "mine"
# [[provides]]
# interface = "scheduler"
# version = 0
# name = "mine"
# summary = "One at a time"
# ///
from pegboard import hookimpl
from pegboard.interfaces.scheduler import Scheduler


class Mine(Scheduler):
    def plan(self, queue, step):
        for seq in [*queue.running, *queue.waiting][:1]:
            step.add(seq, seq.num_pending)


@hookimpl
def pegboard_schedulers():
    return {"mine": lambda context: Mine()}
"""


def test_a_single_file_plugin(tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "my_plugin.py"
    path.write_text(SINGLE_FILE)
    config = named(tiny_model, "mine", plugins={"load": [str(path)]})
    with Engine(config) as engine:
        requests = [engine.submit([1, 2, 3]) for _ in range(2)]
        first_to_end = []
        while engine.has_work():
            first_to_end += [d.request_id for d in engine.step() if d.finish_reason is not None]
    assert first_to_end == [request.request_id for request in requests]
    assert engine.prepared.composition.parts["scheduler"].origin.path == str(path)


def test_files_of_one_name_are_different_plugins(tmp_path: Path, tiny_model: Path) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "plugin.py")
        files[-1].write_text(SINGLE_FILE.replace("mine", f"mine_{name}"))
    config = named(tiny_model, "mine_b", plugins={"load": [str(file) for file in files]})
    with Engine(config) as engine:
        assert engine.prepared.composition.parts["scheduler"].origin.path == str(files[1])


def test_two_plugins_of_one_name_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    files = [tmp_path / "one.py", tmp_path / "two.py"]
    for file in files:
        file.write_text(SINGLE_FILE)
    with pytest.raises(errors.DuplicateName, match=r"two\.py.*one\.py"):
        prepare(named(tiny_model, "mine", plugins={"load": [str(file) for file in files]}))


KERNEL_FILE = """# /// pegboard
# [plugin]
# name = "{name}"
# [[provides]]
# interface = "kernel"
# version = 0
# name = "{family}"
# summary = "s"
# priority = {priority}
# operations = [{{operation = "silu_mul"}}]
# ///
import torch
from pegboard import hookimpl
from pegboard.interfaces.kernel import SiluMulKernel


class Mine(SiluMulKernel):
    def __init__(self, context):
        self.context = context

    def self_test(self):
        assert {works}, "the tile is wrong"

    def silu_mul(self, gate, up):
        return torch.nn.functional.silu(gate) * up


@hookimpl
def pegboard_kernels():
    return {{"{family}": Mine}}
"""


def kernel_file(folder: Path, name: str, family: str, priority: int = 0, works: bool = True) -> str:
    path = folder / f"{name}.py"
    path.write_text(KERNEL_FILE.format(name=name, family=family, priority=priority, works=works))
    return str(path)


def silu_kernel(engine: Engine) -> str:
    kernels = engine.prepared.composition.kernels
    return next(kernel.part.name for kernel in kernels if kernel.operation == "silu_mul")


def test_a_kernel_of_negative_priority_runs_when_it_is_named(
    tmp_path: Path, tiny_model: Path
) -> None:
    load = [kernel_file(tmp_path, "slow", "slow", priority=-1)]
    with Engine(config_of(tiny_model, plugins={"load": load})) as engine:
        assert silu_kernel(engine) == "torch"
    config = config_of(tiny_model, plugins={"load": load}, kernels={"silu_mul": "slow"})
    with Engine(config) as engine:
        assert silu_kernel(engine) == "slow"
    with Engine(config_of(tiny_model, plugins={"load": load}, kernels="slow")) as engine:
        assert silu_kernel(engine) == "slow"
        decisions = {
            decision.key: decision.why for decision in engine.prepared.composition.decisions
        }
        assert decisions["kernels.linear"] == "slow has none that fits"
    with pytest.raises(errors.UserError, match=r"kernels\.rotary: slow has no kernel"):
        Engine(config_of(tiny_model, plugins={"load": load}, kernels={"rotary": "slow"}))


def test_kernels_that_fail_their_self_test_are_left_out_unless_named(
    tmp_path: Path, tiny_model: Path
) -> None:
    load = [
        kernel_file(tmp_path, "bad", "bad", priority=9, works=False),
        kernel_file(tmp_path, "worse", "worse", priority=8, works=False),
    ]
    with Engine(config_of(tiny_model, plugins={"load": load})) as engine:
        assert silu_kernel(engine) == "torch"
    with pytest.raises(errors.KernelUnusable, match="the tile is wrong"):
        Engine(config_of(tiny_model, plugins={"load": load}, kernels={"silu_mul": "bad"}))


def test_kernels_of_one_name_are_settled_by_replace_and_run_as_chosen(
    tmp_path: Path, tiny_model: Path
) -> None:
    load = [kernel_file(tmp_path, "mine", "torch")]
    with pytest.raises(errors.UserError, match="provided by several plugins"):
        Engine(config_of(tiny_model, plugins={"load": load}))
    replace = {"kernel.torch": "builtin"}
    with Engine(config_of(tiny_model, plugins={"load": load, "replace": replace})) as engine:
        chosen = {kernel.part.origin.plugin for kernel in engine.prepared.composition.kernels}
        assert chosen == {"builtin"}
    with pytest.raises(errors.ConfigError, match="does not provide it"):
        Engine(config_of(tiny_model, plugins={"load": load, "replace": {"kernel.torch": "no"}}))


def test_a_single_file_without_manifest_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "my_plugin.py"
    path.write_text("x = 1\n")
    with pytest.raises(errors.ManifestInvalid, match="/// pegboard"):
        prepare(config_of(tiny_model, plugins={"load": [str(path)]}))


def test_an_object_instead_of_a_name(tiny_model: Path) -> None:
    from pegboard.interfaces.scheduler import QueueView, Scheduler, StepBuilder

    class Counting(Scheduler):
        plans = 0

        def plan(self, queue: QueueView, step: StepBuilder) -> None:
            self.plans += 1
            for seq in [*queue.running, *queue.waiting]:
                step.add(seq, seq.num_pending)

    scheduler = Counting()
    with Engine(config_of(tiny_model), scheduler=scheduler) as engine:
        engine.submit([1, 2, 3])
        while engine.has_work():
            engine.step()
    assert scheduler.plans > 0


def test_objects_for_interfaces_of_which_there_are_several(tiny_model: Path) -> None:
    import torch

    from pegboard.interfaces.kernel import SiluMulKernel
    from pegboard.interfaces.logits_processor import LogitsProcessor
    from pegboard.interfaces.observer import Event, Observer
    from pegboard.request import SamplingParams

    class Listening(Observer):
        def __init__(self) -> None:
            self.events: list[Event] = []

        def observe(self, event: Event) -> None:
            self.events.append(event)

        def close(self) -> None:
            pass

    class Only7(LogitsProcessor):
        manifest: ClassVar = {"name": "only_7"}

        def admit(self, row: int, params: Any) -> None:
            pass

        def apply(self, logits: torch.Tensor, rows: Any) -> None:
            logits[:, 7] = 1e9

        def release(self, row: int) -> None:
            pass

    class Counting(SiluMulKernel):
        manifest: ClassVar = {"operations": [{"operation": "silu_mul"}]}
        calls = 0

        def self_test(self) -> None:
            pass

        def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.nn.functional.silu(gate) * up

    listening, kernel = [Listening(), Listening()], Counting()
    config = config_of(tiny_model)
    with Engine(config, observer=listening, logits_processor=Only7(), kernel=kernel) as engine:
        params = SamplingParams(max_tokens=3, processors={"only_7": {}})
        engine.submit([1, 2, 3], params)
        tokens: list[int] = []
        while engine.has_work():
            tokens += [token for delta in engine.step() for token in delta.token_ids]
    assert tokens == [7, 7, 7]
    assert kernel.calls > 0
    assert listening[0].events and len(listening[0].events) == len(listening[1].events)


def test_options_of_a_builtin_that_is_always_on(tiny_model: Path) -> None:
    config = config_of(
        tiny_model, observers=[{"name": "metrics", "options": {"vllm_names": False}}]
    )
    parts = {part.name: part for part in prepare(config).composition.observers}
    assert parts["metrics"].options == {"vllm_names": False}
    wrong = config_of(tiny_model, observers=[{"name": "metrics", "options": {"nonsense": 1}}])
    with pytest.raises(errors.OptionsInvalid, match=r"observers.*nonsense"):
        prepare(wrong)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kv_transfer": "anything"}, "moves no KV"),
        ({"executor": {"name": "local", "tensor_parallel": 2}}, "runs one worker"),
    ],
)
def test_what_would_be_inactive_is_refused(
    tiny_model: Path, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.UserError, match=said):
        prepare(config_of(tiny_model, **values))


def test_an_object_of_the_wrong_kind_is_refused(tiny_model: Path) -> None:
    with pytest.raises(errors.InterfaceNotSatisfied, match="without plan"):
        Engine(config_of(tiny_model), scheduler=object())
    with pytest.raises(errors.ConfigError, match="cannot be an object"):
        Engine(config_of(tiny_model), schedular=object())
