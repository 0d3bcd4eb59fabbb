"""The line that a command prints of a mistake."""

from __future__ import annotations

import pytest
import typer

from pegboard.cli.run import run
from pegboard.errors import ConfigError


def test_a_traceback_holds_nothing_that_a_terminal_obeys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.command()
    def fails() -> None:
        raise ConfigError("seed", "wrong") from ValueError("\x1b[2J\u202e")

    monkeypatch.setenv("PEGBOARD_RAISE", "1")
    assert run(app, [], name="fails") == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback") or "\nTraceback" in said
    assert "ValueError: \\x1b[2J" in said and said.endswith("error: seed: wrong\n")
    assert said.replace("\n", "").isprintable()
