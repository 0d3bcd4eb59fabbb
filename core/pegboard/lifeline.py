"""Ties child processes to their parent: neither a signal nor a crash leaves them behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Makes this process end when the parent does, however that ends.

    The parent holds the other end of this process's standard input, of which nothing else may read.

    Args:
        parent: the parent's process id, as the parent itself knows it.
    """
    die_with_parent(parent)
    end_with_input()


def end_with_input() -> None:
    """Makes this process end when its standard input does, of which nothing else may read."""
    threading.Thread(target=_wait_for_end, name="lifeline", daemon=True).start()


def die_with_parent(parent: int) -> None:
    """Asks the kernel, on Linux, to kill this process when the parent ends: for a process that may
    be too busy to notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Ignores SIGINT and SIGTERM, which a terminal or a service manager sends to all processes of a
    group: the parent lets open requests finish, and then ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _wait_for_end() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)
