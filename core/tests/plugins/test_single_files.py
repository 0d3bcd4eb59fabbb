"""A plugin in a single file is loaded by its path, and is held to what others are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine, errors
from pegboard.compose import prepare
from pegboard.config import Config
from pegboard.plugins.contracts import CONTRACTS

Configure = Callable[..., Config]


SINGLE_FILE = """# /// pegboard
# [plugin]
# name = "mine"
# [[provides]]
# interface = "scheduler"
# version = 1
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


def test_a_single_file_plugin(tmp_path: Path, named: Configure) -> None:
    path = tmp_path / "my_plugin.py"
    path.write_text(SINGLE_FILE)
    config = named("mine", plugins={"load": [str(path)]})
    with Engine(config) as engine:
        requests = [engine.submit([1, 2, 3]) for _ in range(2)]
        first_to_end = []
        while engine.has_work():
            first_to_end += [d.request_id for d in engine.step() if d.finish_reason is not None]
    assert first_to_end == [request.request_id for request in requests]
    assert engine.prepared.composition.parts["scheduler"].origin.path == str(path)


OF_NO_MODEL = """# /// pegboard
# [plugin]
# name = "mine"
# [[provides]]
# interface = "{interface}"
# version = {version}
# name = "mine"
# summary = "Its manifest names a model that does not exist"
# {field} = "{model}"
# ///
"""


@pytest.mark.parametrize(
    ("interface", "field", "config"),
    [
        ("scheduler", "options", {"scheduler": "mine"}),
        ("observer", "options", {"observers": ["mine"]}),
        ("logits_processor", "options", {"logits_processors": ["mine"]}),
        ("logits_processor", "params", {"logits_processors": ["mine"]}),
    ],
)
@pytest.mark.parametrize("model", [":Missing", "pegboard_missing.options:Missing"])
def test_a_model_that_does_not_exist_is_found_before_the_start(
    tmp_path: Path,
    config_of: Configure,
    interface: str,
    field: str,
    config: dict[str, Any],
    model: str,
) -> None:
    path = tmp_path / "of_no_model.py"
    version = max(CONTRACTS[interface].versions)
    path.write_text(
        OF_NO_MODEL.format(interface=interface, version=version, field=field, model=model)
    )
    with pytest.raises(errors.PluginImportFailed, match=f"its manifest names '{model}'"):
        prepare(config_of(plugins={"load": [str(path)]}, **config))


ALLOCATOR = """# /// pegboard
# [plugin]
# name = "mine"
# [[provides]]
# interface = "kv_allocator"
# version = 2
# name = "mine"
# summary = "A proxy that fails once it was looked at"
# promises = ["sharing"]
# ///
from pegboard import hookimpl
from pegboard.builtin.paged_allocator import PagedAllocator


class Mine(PagedAllocator):
    num_looked_at = 0

    @property
    def __class__(self):
        Mine.num_looked_at += 1
        if Mine.num_looked_at > 1:
            raise RuntimeError("not again")
        return Mine


@hookimpl
def pegboard_kv_allocators():
    return {"mine": Mine}
"""


def test_what_raises_outside_of_factories_is_named_too(
    tmp_path: Path, config_of: Configure
) -> None:
    path = tmp_path / "allocator.py"
    path.write_text(ALLOCATOR)
    config = config_of(
        kv_cache={"memory": "8MiB", "allocator": "mine"}, plugins={"load": [str(path)]}
    )
    with pytest.raises(errors.PluginFailed, match=r"starting the engine failed.*not again"):
        Engine(config)


def test_files_of_one_name_are_different_plugins(tmp_path: Path, named: Configure) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "plugin.py")
        files[-1].write_text(SINGLE_FILE.replace("mine", f"mine_{name}"))
    config = named("mine_b", plugins={"load": [str(file) for file in files]})
    with Engine(config) as engine:
        assert engine.prepared.composition.parts["scheduler"].origin.path == str(files[1])


def test_two_plugins_of_one_name_are_refused(tmp_path: Path, named: Configure) -> None:
    files = [tmp_path / "one.py", tmp_path / "two.py"]
    for file in files:
        file.write_text(SINGLE_FILE)
    with pytest.raises(errors.DuplicateName, match=r"two\.py.*one\.py"):
        prepare(named("mine", plugins={"load": [str(file) for file in files]}))


def test_a_single_file_without_manifest_is_refused(tmp_path: Path, config_of: Configure) -> None:
    path = tmp_path / "my_plugin.py"
    path.write_text("x = 1\n")
    with pytest.raises(errors.ManifestInvalid, match="/// pegboard"):
        prepare(config_of(plugins={"load": [str(path)]}))


def test_an_import_that_fails_says_how_to_see_the_whole_of_it(
    tmp_path: Path, named: Configure
) -> None:
    path = tmp_path / "my_plugin.py"
    path.write_text(SINGLE_FILE.replace("class Mine", "1 / 0\n\n\nclass Mine"))
    with pytest.raises(errors.PluginImportFailed, match="ZeroDivisionError") as caught:
        Engine(named("mine", plugins={"load": [str(path)]}))
    assert caught.value.fix.startswith(f"mend {path}; with PEGBOARD_RAISE=1")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
