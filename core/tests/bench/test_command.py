"""Mistakes on the command line are one line and status 2, before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pegboard.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--config: missing"),
        (["--url", "http://127.0.0.1:9", "--config", "x.yaml"], "--url: given with a model"),
        (["--url", "127.0.0.1:9"], "--url: '127.0.0.1:9'; allowed: http://HOST:PORT"),
        (["--url", "http://127.0.0.1:9"], "cannot be reached"),
        (["--url", "http://[::1", "--num-prompts", "1"], "--url"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["model", "--set", "modle=x"], "modle"),
        (["model", "--input-len", "9:5"], "--input-len: '9:5'"),
        (["model", "--goodput", "ttft:5", "itl"], "itl"),
        (["model", "--goodput", "speed:5"], "--goodput: 'speed:5'"),
        (["model", "--request-rate", "0"], "--request-rate: 0"),
        (["model", "--burstiness", "nan"], "--burstiness: nan"),
        (["model", "--num-prompts", "0"], "--num-prompts"),
        (["model", "--json", "nowhere/out.json"], "--json: nowhere/out.json cannot be written"),
        (["model", "--html", "."], "--html: . cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(
    arguments: list[str],
    said: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("error: ")


def test_what_serve_says_of_a_model_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capfd.readouterr().err


def test_targets_may_follow_one_flag(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--url", "http://127.0.0.1:9", "--goodput", "ttft:500", "itl:50", "e2el:9000"]
    assert main(["bench", *arguments]) == 2
    assert "cannot be reached" in capfd.readouterr().err


def test_the_command_line_alone_loads_none_of_what_the_command_needs() -> None:
    code = (
        "import sys, pegboard.cli.app\n"
        "print([m for m in ('httpx', 'jinja2', 'asyncio', 'pegboard.bench') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
