"""Work in a thread that nobody has to wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_daemon(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a function in a thread; returns or raises what it does. Unlike a thread of
    `asyncio.to_thread`, this one does not hold up the end of the loop or of the process."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
