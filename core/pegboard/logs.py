"""How the processes of a server log: one line an event, on standard error."""

from __future__ import annotations

import logging

from pegboard.errors import printable


class _PrintableLines(logging.Formatter):
    """Escapes control characters. Lines and tracebacks hold texts of plugins, files and clients, which no
    terminal should obey."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def configure_logging(level: int = logging.INFO) -> None:
    """Sets up the root logger, unless the embedding program has done so."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
