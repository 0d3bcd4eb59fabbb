"""The files that a measurement is written to: its numbers, and a page with plots."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from pegboard.errors import ConfigError

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write all numbers there.", metavar="FILE")
]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", help="Write a page with plots there.", metavar="FILE")
]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """Made before a run, whose result would be lost where they cannot be written.

    Attributes:
        json, html: the files; None: not wanted.

    Raises:
        ConfigError: one cannot be written.
    """

    json: Path | None
    html: Path | None

    def __post_init__(self) -> None:
        for file, flag in ((self.json, "--json"), (self.html, "--html")):
            if file is not None and not _is_writable(file):
                raise ConfigError(
                    flag, f"{file} cannot be written", allowed="a file in a folder that is there"
                )

    def write(self, result: Result, page: Callable[[Result], str]) -> None:
        """Writes the files that are wanted, and says so.

        Args:
            result: plain values, or what msgspec makes such of.
            page: the HTML of a result.
        """
        import msgspec

        if self.json is not None:
            self.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
            typer.echo(f"numbers: {self.json}")
        if self.html is not None:
            self.html.write_text(page(result), encoding="utf-8")
            typer.echo(f"page: {self.html}")


def _is_writable(file: Path) -> bool:
    return not file.is_dir() and os.access(file if file.exists() else file.parent, os.W_OK)
