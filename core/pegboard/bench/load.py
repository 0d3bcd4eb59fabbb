"""Runs a load: sends each request when it is due, until all have ended or somebody interrupts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from pegboard.bench.exchange import Clock, Record

Send = Callable[[Record], Awaitable[None]]
"""Sends a request and returns when its answer has ended."""


async def open_loop(
    records: Sequence[Record], send: Send, clock: Clock, max_concurrency: int | None
) -> None:
    """Sends each request at its scheduled time, even if those before have not ended.

    With `max_concurrency` a request that is due waits for one of the places. It is still counted from
    its scheduled time: a server that stalls does not make its clients come later.
    """
    places = (
        contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )

    async def take_place(record: Record) -> None:
        async with places:
            await send(record)

    async with asyncio.TaskGroup() as tasks:
        for record in records:
            await asyncio.sleep(max(0.0, record.scheduled - clock()))
            tasks.create_task(take_place(record))


async def closed_loop(
    records: Sequence[Record], send: Send, clock: Clock, num_clients: int
) -> None:
    """So many clients, each of which sends its next request when its last has ended.

    There is no schedule beside that: a request's scheduled time is when its client became free.
    """
    waiting = iter(records)

    async def client() -> None:
        for record in waiting:
            record.scheduled = clock()
            await send(record)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(num_clients, len(records))):
            tasks.create_task(client())


async def until(stop: asyncio.Event, load: Awaitable[None]) -> bool:
    """Runs the load; returns whether it was stopped, and what was open then is left as it is."""
    running = asyncio.ensure_future(load)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
            return False
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return True
    finally:
        running.cancel()
        stopping.cancel()
