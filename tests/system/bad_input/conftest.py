"""Commands that must refuse, and the model that is damaged for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pegboard.cli import main
from pegboard.testing.tiny import write_tiny_model

MAX_S = 60.0
"""Of one refusal; long, because other processes may take the cores."""

COMMANDS = {
    "serve": ["serve", "{model}", "--port", "0"],
    "pegboard generate": ["pegboard", "generate", "{model}", "--prompt", "x"],
    "pegboard check": ["pegboard", "check", "{model}"],
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model with a tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", tokenizer=True)


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged. The model's files are small."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in tiny.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """The folder for temporary files of the commands, which must be empty when they have ended."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    yield folder
    assert not list(folder.iterdir())


class Refuse:
    """Runs a command that must refuse; its lines."""

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary

    def __call__(self, command: str, model: str | Path, *arguments: str) -> list[str]:
        name, *rest = [word.replace("{model}", str(model)) for word in COMMANDS[command]]
        program = Path(sys.executable).with_name(name)
        environment = {
            **os.environ,
            "TMPDIR": str(self._temporary),
            "PEGBOARD_CACHE": str(self._temporary.with_name("cache")),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        started = time.monotonic()
        run = subprocess.run(
            [program, *rest, "--set", "threads=1", *arguments],
            capture_output=True,
            text=True,
            timeout=MAX_S,
            env=environment,
            start_new_session=True,
        )
        assert time.monotonic() - started < MAX_S
        assert run.returncode == 2, run.stderr
        assert run.stdout == ""
        # The engine's process imports plugins, while the server already answers that it loads.
        lines = [line for line in run.stderr.splitlines() if " INFO pegboard." not in line]
        assert lines and all(line.startswith("error: ") for line in lines), run.stderr
        assert not _started_by(str(self._temporary))
        return lines


def _started_by(temporary: str) -> list[int]:
    """Processes that the command left behind: they have its environment."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == temporary:
                left.append(process.pid)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return left


@pytest.fixture
def refuse(temporary: Path) -> Refuse:
    return Refuse(temporary)


@pytest.fixture(
    params=["here", pytest.param("in its own process", marks=pytest.mark.slow)], ids=str
)
def refuse_early(
    request: pytest.FixtureRequest, refuse: Refuse, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Has a command refuse what it looks at before it starts anything; its lines."""

    def here(command: str, model: str | Path, *arguments: str) -> list[str]:
        words = [word.replace("{model}", str(model)) for word in COMMANDS[command]]
        assert main([*words[words[0] == "pegboard" :], "--set", "threads=1", *arguments]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        lines = said.err.splitlines()
        assert lines and all(line.startswith("error: ") for line in lines), said.err
        return lines

    return here if request.param == "here" else refuse
