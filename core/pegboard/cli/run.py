"""Running a command: a user's mistake is one line and status 2, a bug is a traceback and status 1."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import typer

from pegboard.cli.output import print_tracebacks
from pegboard.errors import CompositionRefused, ConfigMistakes, UserError, printable


def run(app: typer.Typer, arguments: Sequence[str] | None, *, name: str) -> int:
    """Runs a typer application.

    Args:
        app: the application.
        arguments: of the command line; None: the process's.
        name: the command, for help and messages.

    Returns:
        The exit status. A bug is raised, so that Python prints its traceback and ends with 1. With
        PEGBOARD_RAISE=1 in the environment a mistake's traceback stands before its line: a plugin's
        error has what the plugin raised beneath.
    """
    command = typer.main.get_command(app)
    try:
        status = command.main(args=arguments, prog_name=name, standalone_mode=False)
    except typer.Abort:
        return 130
    except Exception as error:
        reasons = _mistakes(error)
        if not reasons:
            raise
        print_tracebacks(["".join(traceback.format_exception(error))])
        for reason in reasons:
            typer.echo(f"error: {printable(reason)}", err=True)
        return 2
    return status if isinstance(status, int) else 0


def _mistakes(error: Exception) -> tuple[str, ...]:
    """The user's mistakes, a line each; none for a bug."""
    if isinstance(error, (CompositionRefused, ConfigMistakes)):
        return error.reasons
    if isinstance(error, UserError):
        return (str(error),)
    # Some versions of typer depend on click and some carry a copy of it, so that the class of an
    # error in the arguments has no one name; all have this method.
    message = getattr(error, "format_message", None)
    return (" ".join(message().split()),) if callable(message) else ()
