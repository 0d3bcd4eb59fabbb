"""The number of files that the server may open, and so of connections: each is one."""

from __future__ import annotations

import resource

from pegboard.errors import ConfigError

MAX_FILES = 2**16
"""Most files up to which the soft limit is raised, if the hard one allows."""

MAX_CONNECTIONS = 4096
"""Most connections by default. Each may hold a head and a piece of body of 64 KiB."""

RESERVED_FILES = 128
"""For all but connections: sockets and pipes to the processes of the server, files that are read, and the
few connections that are taken from the system before those that give way to them are closed."""


def raise_limit() -> int:
    """Raises the soft limit of open files; how many there may be now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # some systems allow less than the hard limit says
        return soft
    return wanted


def max_connections(wanted: int | None, num_files: int) -> int:
    """Most connections at a time.

    Args:
        wanted: `server.max_connections`; None: auto.
        num_files: most open files.

    Raises:
        ConfigError: so many files do not suffice.
    """
    most = num_files - RESERVED_FILES
    if most < 1 or (wanted is not None and wanted > most):
        raise ConfigError(
            "server.max_connections",
            f"{'auto' if wanted is None else wanted}, where the system allows {num_files} open files",
            allowed=f"{RESERVED_FILES} less than those files",
            fix=f"ulimit -n {(wanted or 1024) + RESERVED_FILES}",
        )
    return min(most, MAX_CONNECTIONS) if wanted is None else wanted
