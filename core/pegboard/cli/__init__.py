"""The commands, one file each. The two entry points import nothing before they are called."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `pegboard`; returns the exit status."""
    from pegboard.cli.app import application
    from pegboard.cli.run import run

    return run(application(), arguments, name="pegboard")


def serve_main(arguments: Sequence[str] | None = None) -> int:
    """The command `serve`, which is `pegboard serve`."""
    from pegboard.cli.app import serve_application
    from pegboard.cli.run import run

    return run(serve_application(), arguments, name="serve")
