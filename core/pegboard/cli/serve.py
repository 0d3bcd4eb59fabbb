"""`pegboard serve` and `serve`: the OpenAI API over HTTP."""

from __future__ import annotations

import typer

from pegboard.config import Config


def serve(config: Config) -> None:
    """Serve a model through the OpenAI API until SIGTERM or Ctrl-C."""
    import pegboard.server

    raise typer.Exit(pegboard.server.run(config))
