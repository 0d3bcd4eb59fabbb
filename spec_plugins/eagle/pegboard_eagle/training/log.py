"""The log of a training: JSON lines, each with the step after which it was written."""

from __future__ import annotations

import json
from pathlib import Path


class Log:
    """A log that goes on behind a step: what a run that was broken off wrote past it goes.

    Args:
        step: that the training goes on from.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if _step(line) <= step]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def write(self, step: int, **values: object) -> None:
        """Adds a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def _step(line: str) -> float:
    """The step of a line; one that was cut off belongs to none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
