"""Prints texts of plugins, checkpoints and other files without control sequences."""

from __future__ import annotations

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
    typer.echo(
        "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)
    )


def print_tracebacks(texts: Iterable[str]) -> None:
    """Prints on standard error where plugins raised, if PEGBOARD_RAISE=1 asks for it."""
    if os.environ.get("PEGBOARD_RAISE") == "1":
        for line in (line for text in texts for line in text.splitlines()):
            typer.echo(printable(line), err=True)


def _escaped(char: str) -> str:
    """The character's escape in JSON."""
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
