"""The typer applications: the commands of the core, and those that plugins add."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from pegboard.cli.bench import SeveralTargets, bench
from pegboard.cli.check import check
from pegboard.cli.command_context import EngineCommandContext
from pegboard.cli.eval import evaluate
from pegboard.cli.flags import FLAGS
from pegboard.cli.generate import generate
from pegboard.cli.options import EITHER_DASH, SeveralValues, takes_config
from pegboard.cli.plugins import plugins
from pegboard.cli.serve import serve
from pegboard.errors import printable
from pegboard.plugins.listing import command_entries, load_command


class CommandsWithPlugins(TyperGroup):
    """The core's commands, and those of plugins, each imported only when it runs.

    A plugin cannot take the name of a command of the core.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, for help."""
        own = super().list_commands(ctx)
        return [*own, *sorted(set(dict(command_entries())) - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command; of a plugin's only name and summary, which is enough for help."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        summary = dict(command_entries()).get(cmd_name)
        return None if summary is None else _described(cmd_name, summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command to run."""
        name = args[0]
        if name in self.commands or name not in dict(command_entries()):
            return super().resolve_command(ctx, args)
        return name, load_command(name, typer.main.get_command), args[1:]


def _described(name: str, summary: str) -> Any:
    described = _typer()
    described.command(name, help=printable(summary))(lambda: None)
    return typer.main.get_command(described)


def application() -> typer.Typer:
    """`pegboard`."""
    app = _typer(cls=CommandsWithPlugins, help="Pegboard, an LLM inference engine made of plugins.")

    @app.callback(invoke_without_command=True)
    def with_context(ctx: typer.Context) -> None:
        ctx.obj = EngineCommandContext()
        if ctx.invoked_subcommand is None:
            typer.echo(ctx.get_help())

    in_process_flags = [flag for flag in FLAGS if not flag.key.startswith("server.")]
    app.command(cls=SeveralValues, context_settings=EITHER_DASH)(takes_config(serve))
    app.command(cls=SeveralValues, context_settings=EITHER_DASH)(
        takes_config(generate, flags=in_process_flags)
    )
    app.command(cls=SeveralTargets, context_settings=EITHER_DASH)(bench)
    app.command("eval", context_settings=EITHER_DASH)(evaluate)
    app.command()(plugins)
    app.command(cls=SeveralValues, context_settings=EITHER_DASH)(takes_config(check))
    return app


def serve_application() -> typer.Typer:
    """`serve`."""
    app = _typer()
    app.command(cls=SeveralValues, context_settings=EITHER_DASH)(takes_config(serve))
    return app


def _typer(**settings: Any) -> typer.Typer:
    # Boxes would cut the names of long flags.
    return typer.Typer(add_completion=False, rich_markup_mode=None, **settings)
