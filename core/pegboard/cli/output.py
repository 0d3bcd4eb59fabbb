"""Prints texts of plugins, checkpoints and other files without control sequences."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import msgspec
import typer

from pegboard.errors import printable


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines on standard output."""
    for line in lines:
        typer.echo(printable(line))


def print_json(value: Any) -> None:
    """Prints a value as JSON on standard output."""
    text = msgspec.json.format(msgspec.json.encode(value)).decode()
    # The standard library escapes more than has to be, but any character that does.
    typer.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def print_tracebacks(texts: Iterable[str]) -> None:
    """Prints on standard error where plugins raised, if PEGBOARD_RAISE=1 asks for it."""
    if os.environ.get("PEGBOARD_RAISE") == "1":
        for line in (line for text in texts for line in text.splitlines()):
            typer.echo(printable(line), err=True)
