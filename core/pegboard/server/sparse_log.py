"""Lines that clients cause, and of which they cannot cause too many."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

logger = logging.getLogger("pegboard.server")


class SparseLog:
    """Logs lines of one kind: the first of each period are written, the others counted at its end.

    Args:
        what: the events, as that line calls them: "12 more WHAT within 10 s".
        max_lines: written in a period.
        period_s: begins with an event.
    """

    def __init__(self, what: str, max_lines: int, period_s: float) -> None:
        self._what = what
        self._max_lines = max_lines
        self._period_s = period_s
        self._num_events = 0

    def warn(self, message: str, *args: Any) -> None:
        """Tells of an event. Called in the event loop."""
        if not self._num_events:
            asyncio.get_running_loop().call_later(self._period_s, self._end_period)
        self._num_events += 1
        if self._num_events <= self._max_lines:
            logger.warning(message, *args)

    def _end_period(self) -> None:
        num_more = self._num_events - self._max_lines
        self._num_events = 0
        if num_more > 0:
            logger.warning("%d more %s within %g s", num_more, self._what, self._period_s)
