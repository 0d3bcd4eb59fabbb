"""Real distributions, written into a folder on the path, as `pip install --target` leaves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from pegboard.testing.tiny import write_tiny_model

SCHEDULER_MANIFEST = """
[plugin]
name = "{name}"

[[provides]]
interface = "scheduler"
version = 0
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
    return {{"{provides}": lambda context: OneByOne()}}
"""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution `pegboard-<name>` with a package `pegboard_<name>`."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def install(
        name: str,
        manifest: str | None = None,
        code: str | None = None,
        provides: str = "one_by_one",
        version: str = "1.2.3",
    ) -> Path:
        package = site / f"pegboard_{name}"
        package.mkdir()
        manifest = SCHEDULER_MANIFEST if manifest is None else manifest
        code = SCHEDULER_CODE if code is None else code
        if manifest:
            text = manifest.replace("{name}", name).replace("{provides}", provides)
            (package / "plugin.toml").write_text(dedent(text))
        code = code.replace("{provides}", provides).replace("{{", "{").replace("}}", "}")
        (package / "__init__.py").write_text(dedent(code))
        info = site / f"pegboard_{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: pegboard-{name}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(f"[pegboard]\n{name} = pegboard_{name}\n")
        return package

    return install


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
