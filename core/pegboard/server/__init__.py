"""The OpenAI-compatible server: HTTP in this process, the engine in a child."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.config import Config


def run(config: Config) -> int:
    """Serves a model until SIGTERM or SIGINT, and returns the exit status.

    Returns:
        0 after an orderly end, 1 when the engine died.

    Raises:
        UserError: the port is taken, or the composition cannot start; nothing is left running.
    """
    # The engine's process is a module of this package too, and has no use for the web framework.
    from pegboard.server.supervisor import serve

    return serve(config)
