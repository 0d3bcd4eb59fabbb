"""The places for connections, and which connections give way to new ones."""

from __future__ import annotations

from typing import Protocol

from pegboard.server.sparse_log import SparseLog

PERIOD_S = 60.0


class Guest(Protocol):
    """A connection, as `Places` know it."""

    def give_way(self) -> bool:
        """Closes an idle connection; False: it still sends its last answer."""


class Places:
    """The connections of a server. When there are as many as may be, the one that has been idle longest
    gives way to a new one; those with a request in flight never do."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._taken: set[Guest] = set()
        self._idle: dict[Guest, None] = {}  # those idle longest come first
        self._log = SparseLog(
            "connections were closed or refused, since there are as many as may be",
            max_lines=1,
            period_s=PERIOD_S,
        )

    def take(self, guest: Guest) -> bool:
        """Takes a place for a new connection, which is idle; False: there is none."""
        if len(self._taken) >= self.max_connections and not self._make_room():
            return False
        self._taken.add(guest)
        self._idle[guest] = None
        return True

    def work(self, guest: Guest) -> None:
        """A request of the connection's is in flight."""
        self._idle.pop(guest, None)

    def rest(self, guest: Guest) -> None:
        """No request of the connection's is in flight."""
        if guest in self._taken:
            self._idle.setdefault(guest)

    def leave(self, guest: Guest) -> None:
        """The connection is closed."""
        self._taken.discard(guest)
        self._idle.pop(guest, None)

    def _make_room(self) -> bool:
        leaving = next((guest for guest in self._idle if guest.give_way()), None)
        self._log.warn(
            "connections=%d, as many as may be (server.max_connections): %s",
            len(self._taken),
            "all are busy, new ones are refused" if leaving is None else "idle ones are closed",
        )
        if leaving is None:
            return False
        self.leave(leaving)
        return True
