"""How the server's two processes log: one line an event, on standard error."""

from __future__ import annotations

import logging


def configure_logging() -> None:
    """Sets up the root logger, unless the embedding program has done so."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
