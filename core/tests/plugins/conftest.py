"""Real distributions: projects that are built into wheels, which are laid out as pip lays them out."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from pegboard.config import Config
from pegboard.testing.tiny import write_tiny_model

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "pegboard-{name}"
version = "1.2.3"

[project.entry-points.pegboard]
{name} = "{module}"

[tool.hatch.build.targets.wheel]
packages = ["pegboard_{name}"]
"""

SCHEDULER_MANIFEST = """
[plugin]
name = "{name}"

[[provides]]
interface = "scheduler"
version = 1
name = "{provides}"
summary = "A scheduler of the test"
"""

SCHEDULER_CODE = """
from pegboard import hookimpl
from pegboard.interfaces.scheduler import Scheduler


class OneByOne(Scheduler):
    def plan(self, queue, step):
        for seq in [*queue.running, *queue.waiting][:1]:
            step.add(seq, seq.num_pending)


@hookimpl
def pegboard_schedulers():
    return {"{provides}": lambda context: OneByOne()}
"""

Files = tuple[tuple[str, str], ...]
"""Path in the project, and text."""


@pytest.fixture(scope="session")
def install_project(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Files], Path]:
    """Builds a project's wheel and installs it into a folder of its own, once for equal projects."""

    @cache
    def install(files: Files) -> Path:
        folder = tmp_path_factory.mktemp("distribution")
        for name, text in files:
            file = folder / "project" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        builder = WheelBuilder(str(folder / "project"))
        (wheel,) = builder.build(directory=str(folder / "dist"), versions=["standard"])
        target = folder / "site"
        # All that pip does with such a wheel, apart from its own records; pip itself takes a second.
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
        return target

    return install


@pytest.fixture
def install(
    install_project: Callable[[Files], Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Installs a distribution `pegboard-<name>` 1.2.3 with a package `pegboard_<name>`, whose folder
    it returns. `{name}` and `{provides}` in its texts are filled in."""

    def install(
        name: str,
        manifest: str = SCHEDULER_MANIFEST,
        code: str = SCHEDULER_CODE,
        provides: str = "one_by_one",
        module: str = "pegboard_{name}",
        **modules: str,
    ) -> Path:
        package = f"pegboard_{name}"
        texts = {"pyproject.toml": PYPROJECT.replace("{module}", module)}
        texts |= {f"{package}/{module}.py": text for module, text in modules.items()}
        texts[f"{package}/__init__.py"] = code
        if manifest:
            texts[f"{package}/plugin.toml"] = manifest
        files = tuple(
            (path, dedent(text).replace("{name}", name).replace("{provides}", provides))
            for path, text in texts.items()
        )
        site = install_project(files)
        monkeypatch.syspath_prepend(str(site))
        return site / package

    return install


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def config_of(tiny_model: Path) -> Callable[..., Config]:
    """(**values) -> a config of the tiny model."""

    def config_of(**values: Any) -> Config:
        small: dict[str, Any] = {
            "model": str(tiny_model),
            "kv_cache": {"memory": "8MiB"},
            "max_model_len": 64,
        }
        # In it only the built-in kernels run, whatever else is installed.
        small["dtype"] = "float64"
        return Config.from_values({**small, **values})

    return config_of


@pytest.fixture
def named(config_of: Callable[..., Config]) -> Callable[..., Config]:
    """(name, **values) -> a config that names a scheduler."""

    def named(name: str = "one_by_one", **values: Any) -> Config:
        return config_of(scheduler={"name": name}, **values)

    return named
