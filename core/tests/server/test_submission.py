"""Deltas between the engine and a reader: all of them, in order, in bounded memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pegboard.errors import EngineDied, EngineError
from pegboard.request import Request, SamplingParams, SequenceDelta, TokenLogprob
from pegboard.server.submission import MAX_WAITING, Submission


class Closed:
    """Notes what is aborted."""

    def __init__(self) -> None:
        self.aborted: list[tuple[str, ...]] = []

    def __call__(self, submission: Submission, unfinished: tuple[str, ...]) -> None:
        self.aborted.append(unfinished)


def submission(closed: Closed, n: int = 1) -> Submission:
    params = SamplingParams(n=n)
    return Submission([Request(request_id="r", prompt_token_ids=(1,), params=params)], closed)


def delta(text: str, count: int, index: int = 0, **more: Any) -> SequenceDelta:
    logprobs = (TokenLogprob(count, -1.0, 1, (), ()),)
    return SequenceDelta("r", index, (count,), text, logprobs, num_output_tokens=count, **more)


async def read(found: Submission) -> list[SequenceDelta]:
    return [one async for one in found]


def test_what_arrives_while_nobody_reads_becomes_one_delta_a_sequence() -> None:
    async def run() -> None:
        found = submission(Closed(), n=2)
        for count in range(1, 4):
            found.push(delta("ab"[:count], count))
            found.push(delta("x", count, index=1))
        found.push(delta("c", 4, finish_reason="length"))
        found.push(delta("", 4, index=1, finish_reason="stop", stop_reason="y"))
        first, second = await read(found)
        assert (first.text, first.token_ids, first.finish_reason) == (
            "aababc",
            (1, 2, 3, 4),
            "length",
        )
        assert (second.text, second.stop_reason) == ("xxx", "y")
        for one in (first, second):
            assert one.logprobs is not None
            assert tuple(entry.token_id for entry in one.logprobs) == one.token_ids
            assert one.num_output_tokens == 4

    asyncio.run(run())


def test_a_reader_that_keeps_up_gets_each_delta() -> None:
    async def run() -> None:
        found = submission(Closed())
        reader = asyncio.create_task(read(found))
        for count in range(1, 5):
            found.push(delta("a", count, finish_reason="stop" if count == 4 else None))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert len(await reader) == 4

    asyncio.run(run())


def test_a_reader_that_never_reads_costs_bounded_memory_and_is_given_up() -> None:
    async def run() -> None:
        closed = Closed()
        found = submission(closed)
        count = 0
        while not closed.aborted:
            count += 1
            found.push(delta("word ", count))
            assert count * 20 < 2 * MAX_WAITING
        assert closed.aborted == [("r",)]
        found.push(delta("more", count))
        with pytest.raises(EngineError, match="too slowly"):
            await read(found)

    asyncio.run(run())


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_a_failed_sequence_is_an_error_after_what_came_before(reason: Any) -> None:
    async def run() -> None:
        closed = Closed()
        found = submission(closed, n=2)
        found.push(delta("a", 1))
        found.push(delta("", 1, finish_reason=reason, error="broken"))
        seen = []
        with pytest.raises(EngineError, match="broken"):
            async for one in found:
                seen.append(one.text)
        assert seen == ["a"]
        assert closed.aborted == [("r",)], "its other sequence goes on for nobody"

    asyncio.run(run())


def test_the_end_of_the_engine_reaches_a_waiting_reader() -> None:
    async def run() -> None:
        found = submission(Closed())
        reader = asyncio.create_task(read(found))
        await asyncio.sleep(0)
        found.fail(EngineDied("gone"))
        with pytest.raises(EngineDied):
            await reader

    asyncio.run(run())


def test_closing_aborts_what_is_open_once() -> None:
    closed = Closed()

    async def run() -> None:
        found = submission(closed)
        found.close()
        found.close()
        done = submission(closed)
        done.push(delta("a", 1, finish_reason="stop"))
        done.close()

    asyncio.run(run())
    assert closed.aborted == [("r",), ()]
