"""Measurements of a server whose delays are known, over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from pegboard.bench.exchange import Record
from pegboard.bench.measuring import Plan, measure
from pegboard.bench.options import Lengths
from pegboard.bench.report import latencies, result
from pegboard.errors import ConfigError

SLACK_S = 5.0
"""How much later than the server sent something a busy machine may see it."""

Answer = Callable[[dict[str, Any]], AsyncIterator[bytes | None]]
"""Body to the bytes to send; None closes the connection."""


class Server:
    """An OpenAI-compatible server on a free port that answers completions as it is told.

    Attributes:
        answer: what completions are answered with, after a status line of 200; the first, which
            asks what the server can do, is answered at once.
        refuses: fields of a body that are answered with 400.
        key: what clients have to send; None: nothing.
        tokens: how it reads any text; none: it has no `/tokenize`.
        bodies: of all completions.
    """

    def __init__(self, answer: Answer, **settings: Any) -> None:
        self.answer = answer
        self.refuses: tuple[str, ...] = settings.get("refuses", ())
        self.key: str | None = settings.get("key")
        self.tokens: list[int] = settings.get("tokens", [7, 8, 9])
        self.bodies: list[dict[str, Any]] = []
        self.num_open = self.most_open = 0

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/v1"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = re.search(r"content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            if self.key is not None and f"authorization: bearer {self.key}" not in head:
                await self._reply(writer, 401, {"error": {"message": "wrong key"}})
            elif head.startswith("get /v1/models"):
                await self._reply(writer, 200, {"data": [{"id": "fake", "max_model_len": 100}]})
            elif head.startswith("post /tokenize") and self.tokens:
                await self._reply(writer, 200, {"tokens": self.tokens})
            elif head.startswith("post /v1/completions"):
                await self._complete(writer, json.loads(body))
            else:
                await self._reply(writer, 404, {})
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        if any(field in body for field in self.refuses):
            await self._reply(writer, 400, {"error": {"message": "unknown field"}})
            return
        self.bodies.append(body)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            writer.write(b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n")
            probed = len(self.bodies) == 1
            async for data in whole(body) if probed else self.answer(body):
                if data is None:
                    writer.transport.abort()
                    return
                writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            self.num_open -= 1

    async def _reply(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} -\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def token(body: dict[str, Any], count: int = 1, **more: Any) -> bytes:
    """A chunk; the text has a line separator, which is no line's end in a stream of events."""
    ids = {"token_ids": [7] * count} if body.get("return_token_ids") else {}
    return event(
        {"choices": [{"index": 0, "text": "a\u2028b", "finish_reason": None, **ids, **more}]}
    )


def end(body: dict[str, Any]) -> bytes:
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    return event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


async def whole(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """An answer at once."""
    yield token(body, body["max_tokens"], finish_reason="length") + end(body)


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "model": None,
        "num_prompts": 4,
        "request_rate": math.inf,
        "burstiness": 1.0,
        "max_concurrency": None,
        "input_lens": Lengths(5, 20),
        "output_lens": Lengths(5, 5),
        "dataset": None,
        "seed": 0,
        "timeout_s": 20.0,
        "goodput": {},
        "percentiles": (50.0, 99.0),
    }
    return Plan(**values | changes)


def bench(server: Server, api_key: str | None = None, **changes: Any) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with server as url:
            return result(await measure(url, api_key, plan(**changes)))

    return asyncio.run(run())


@pytest.mark.timing
def test_the_servers_delays_are_what_is_measured() -> None:
    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.3)
        for _ in range(body["max_tokens"]):
            yield token(body)
            await asyncio.sleep(0.1)
        yield end(body)

    found = bench(Server(answer))
    assert found["completed"] == 4
    assert all(0.3 <= ttft <= 0.3 + SLACK_S for ttft in found["ttfts"])
    assert all(len(gaps) == 4 for gaps in found["itls"])
    assert all(sum(gaps) <= 0.4 + SLACK_S for gaps in found["itls"])
    assert all(0.7 <= e2el <= 0.7 + SLACK_S for e2el in found["e2els"])
    sums = [a + sum(b) for a, b in zip(found["ttfts"], found["itls"], strict=True)]
    assert sums == pytest.approx(found["e2els"])
    assert found["duration"] >= 0.7


def test_requests_are_what_was_asked_for_and_the_servers_counts_are_taken() -> None:
    server = Server(whole)
    found = bench(server, num_prompts=20, output_lens=Lengths(1, 9))
    bodies = server.bodies[1:]
    lengths = sorted((len(body["prompt"]), body["max_tokens"]) for body in bodies)
    assert sorted(zip(found["input_lens"], found["output_lens"], strict=True)) == lengths
    assert all(5 <= num_input <= 20 for num_input, _ in lengths)
    assert all(set(body["prompt"]) <= {7, 8, 9} for body in bodies)
    assert all(body["ignore_eos"] and body["stream"] and body["model"] == "fake" for body in bodies)
    assert [note for note in found["notes"] if "late to send" not in note] == []


@pytest.mark.parametrize("max_concurrency", [None, 1])
def test_a_stall_counts_against_every_request_that_was_due_meanwhile(
    max_concurrency: int | None,
) -> None:
    """The server answers at once but for a second, in which 10 more requests are due. Clients that
    wait for a place before they start the clock would see one slow request."""
    arrived: dict[tuple[int, ...], float] = {}
    answered: dict[tuple[int, ...], float] = {}

    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        key = tuple(body["prompt"])
        arrived[key] = now = time.perf_counter()
        stalls_for = min(arrived.values()) + 1.5 - now
        if 0 < stalls_for < 1.0:
            await asyncio.sleep(stalls_for)
        answered[key] = time.perf_counter()
        async for data in whole(body):
            yield data

    async def run() -> Sequence[Record]:
        load = plan(
            num_prompts=20,
            request_rate=10.0,
            burstiness=math.inf,
            max_concurrency=max_concurrency,
            input_lens=Lengths(20, 20),
        )
        async with Server(answer) as url:
            return (await measure(url, None, load)).records

    records = {tuple(json.loads(record.body)["prompt"]): record for record in asyncio.run(run())}
    assert [record.scheduled for record in records.values()] == pytest.approx(
        [index / 10 for index in range(20)]
    )
    # Nothing arrives before it is sent, so the load began at this moment or before it.
    began = min(arrived[key] - (record.sent or 0.0) for key, record in records.items())
    e2els = {key: latencies(record).e2el for key, record in records.items()}
    for key, record in records.items():
        assert e2els[key] >= answered[key] - began - record.scheduled
    assert sum(e2el > 0.45 for e2el in e2els.values()) >= 5


@pytest.mark.timing
def test_without_a_limit_nobody_waits_for_an_answer_to_send() -> None:
    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        await asyncio.sleep(1.0)
        yield token(body, 5, finish_reason="length") + end(body)

    server = Server(answer)
    found = bench(server, num_prompts=12, request_rate=40.0)
    assert server.most_open == found["max_concurrent_requests"] == 12


def test_so_many_clients_send_one_request_after_another() -> None:
    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.2)
        yield token(body, 5, finish_reason="length") + end(body)

    server = Server(answer)
    found = bench(server, num_prompts=9, max_concurrency=3)
    assert server.most_open == found["max_concurrent_requests"] == 3
    # A client that is busy has no request that waits: the next is due when it is free.
    due = sorted(found["scheduled_times"])
    assert due[3] >= 0.2
    assert due[6] >= 0.4
    assert min(found["ttfts"]) >= 0.2
    assert found["duration"] >= 0.6


def test_a_server_without_extensions_is_measured_by_its_own_counts() -> None:
    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield token(body)
        await asyncio.sleep(0.1)
        yield token(body) + end(body)

    found = bench(Server(answer, refuses=("return_token_ids", "ignore_eos"), tokens=[]))
    assert found["itl_per"] == "chunk"
    assert all(len(gaps) == 1 for gaps in found["itls"])
    assert found["output_lens"] == [5] * 4
    notes = " ".join(found["notes"])
    assert "ignore_eos" in notes and "ITL is between chunks" in notes and "/tokenize" in notes


def test_answers_of_another_length_are_said() -> None:
    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        body = {**body, "max_tokens": 2}
        async for data in whole(body):
            yield data

    found = bench(Server(answer))
    assert found["total_output_tokens"] == 8
    assert "4 of 4 answers have not the length that was asked for." in found["notes"]


def test_failures_are_told_apart_and_the_rest_is_measured() -> None:
    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes | None]:
        kind = body["max_tokens"]
        yield token(body, 1)
        if kind == 1:
            yield event({"error": {"message": "row failed"}}) + b"data: [DONE]\n\n"
        elif kind == 2:
            yield None
        elif kind == 3:
            return
        elif kind == 4:
            yield b"data: {\n\n"
        elif kind == 5:
            await asyncio.sleep(30)
        else:
            yield token(body, kind - 1, finish_reason="length") + end(body)

    found = bench(Server(answer), num_prompts=40, output_lens=Lengths(1, 6), timeout_s=3.0)
    kinds = {
        "error in the stream": "row failed",
        "connection lost": "",
        "stream cut off": "without a finish reason",
        "malformed stream": "",
        "timeout": "within 3 s",
    }
    assert set(found["failures"]) == set(kinds)
    for kind, said in kinds.items():
        assert said in found["failures"][kind]["message"]
    counts = [failure["count"] for failure in found["failures"].values()]
    assert sum(counts) == found["failed"] == 40 - found["completed"]
    assert found["output_lens"].count(6) == found["completed"] > 0


def test_refusals_are_counted_by_their_status() -> None:
    class Refusing(Server):
        async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
            if len(self.bodies) in (2, 3):
                self.bodies.append(body)
                await self._reply(writer, 503, {"error": {"message": "too many"}})
            else:
                await super()._complete(writer, body)

    found = bench(Refusing(whole), num_prompts=6, max_concurrency=1)
    assert found["failures"] == {"HTTP 503": {"count": 2, "message": "too many"}}
    assert found["completed"] == 4


def test_ctrl_c_ends_with_what_was_measured() -> None:
    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        if len(server.bodies) == 6:
            asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGINT)
        yield token(body, 1)
        if len(server.bodies) > 3:
            await asyncio.sleep(30)
        yield token(body, 4, finish_reason="length") + end(body)

    server = Server(answer)
    found = bench(server, num_prompts=10, max_concurrency=3)
    assert found["interrupted"]
    assert (found["completed"], found["open"], found["unsent"], found["failed"]) == (2, 3, 5, 0)
    assert found["duration"] < 10
    assert found["mean_ttft_ms"] is not None


def test_a_key_is_sent_and_a_wrong_one_is_said() -> None:
    assert bench(Server(whole, key="secret"), "secret")["completed"] == 4
    with pytest.raises(ConfigError, match="--api-key: the server refuses it: wrong key"):
        bench(Server(whole, key="secret"), "other")


def test_lengths_that_the_model_cannot_hold_are_refused_before_the_load() -> None:
    server = Server(whole)
    with pytest.raises(ConfigError, match=r"--input-len, --output-len: up to 96 \+ 5 tokens"):
        bench(server, input_lens=Lengths(5, 96))
    assert server.bodies == []


def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match=r"--url: .* cannot be reached"):
        asyncio.run(measure("http://127.0.0.1:9", None, plan()))
