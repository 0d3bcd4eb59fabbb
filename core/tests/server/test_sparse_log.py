"""Clients cannot fill the log."""

from __future__ import annotations

import asyncio

import pytest

from pegboard.server.sparse_log import SparseLog


def test_a_flood_has_its_first_lines_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        log = SparseLog("floods", max_lines=3, period_s=0.05)
        for begin in (0, 1000):
            for number in range(begin, begin + 1000):
                log.warn("flood %d", number)
            await asyncio.sleep(0.2)
        log.warn("flood %d", 2000)
        await asyncio.sleep(0.2)

    asyncio.run(run())
    told = [f"flood {n}" for n in (0, 1, 2)]
    again = [f"flood {n}" for n in (1000, 1001, 1002)]
    more = "997 more floods within 0.05 s"
    assert caplog.messages == [*told, more, *again, more, "flood 2000"]
