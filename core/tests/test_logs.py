"""Nothing in a log acts on a terminal."""

from __future__ import annotations

import logging
import sys

import pytest

from pegboard.logs import configure_logging
from pegboard.plugins.manifest import Origin

NASTY = "\x1b]0;mine\x07\u202e"


def test_a_terminal_obeys_nothing_of_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    configure_logging()
    (handler,) = logging.root.handlers
    try:
        raise ValueError(NASTY)
    except ValueError:
        raised = sys.exc_info()
    said = f"importing {NASTY}"
    lines = handler.format(
        logging.LogRecord("pegboard", logging.ERROR, __file__, 1, said, (), raised)
    ).split("\n")
    assert all(line.isprintable() for line in lines)
    assert "ERROR pegboard: importing \\x1b]0;mine" in lines[0]
    assert lines[1].startswith("Traceback") and lines[-1].startswith("ValueError: \\x1b")


def test_where_a_plugin_comes_from_is_printable_wherever_it_is_said() -> None:
    origin = Origin(plugin="p", distribution=NASTY, version=NASTY, module="m", path=f"/{NASTY}")
    assert str(origin).isprintable()
