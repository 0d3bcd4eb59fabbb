"""Progress bars, on standard error, and only where it is a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(*, hidden: bool = False) -> Progress:
    """A bar to add tasks to; it shows nothing where standard error is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=hidden or not console.is_terminal,
        transient=True,
    )
