"""The requests of one HTTP call, from the moment the engine is given them until all have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pegboard.errors import EngineError, PegboardError
from pegboard.request import JoinedDeltas, Request, SequenceDelta

MAX_WAITING = 2**20
"""Bytes, about, that may wait for a slow reader before its requests are given up."""


@dataclass
class Progress:
    """The progress of a submission's sequences.

    Attributes:
        first_token_s: seconds from the submission to the first token of any.
        reasons: finish reasons of the sequences that have ended.
    """

    first_token_s: float | None = None
    reasons: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)
    _num_cached: dict[str, int] = field(default_factory=dict)
    _num_output: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def num_cached_tokens(self) -> int:
        """Cached tokens of the prompts, each counted once."""
        return sum(self._num_cached.values())

    @property
    def num_output_tokens(self) -> int:
        return sum(self._num_output.values())

    def add(self, delta: SequenceDelta) -> None:
        if self.first_token_s is None and delta.num_output_tokens:
            self.first_token_s = time.perf_counter() - self._began
        if delta.index == 0:
            self._num_cached[delta.request_id] = delta.num_cached_tokens
        self._num_output[delta.request_id, delta.index] = delta.num_output_tokens
        if delta.finish_reason is not None:
            self.reasons.append(delta.finish_reason)


class Submission:
    """An async iterator over the deltas of some requests.

    Deltas of one sequence are joined while nobody reads. The iterator ends when every sequence has
    finished. It raises `RequestError` if the engine refused the requests, and `EngineError` if a
    sequence failed, the engine died, or the reader is too slow.

    Args:
        requests: that were submitted together.
        on_close: called once by `close`, with the ids of the requests that had not finished.

    Attributes:
        progress: of its sequences, also when nobody reads.
    """

    def __init__(
        self, requests: Sequence[Request], on_close: Callable[[Submission, tuple[str, ...]], None]
    ) -> None:
        self.requests = tuple(requests)
        self.progress = Progress()
        self._num_open = {request.request_id: request.params.n for request in requests}
        self._on_close = on_close
        self._waiting: dict[tuple[str, int], JoinedDeltas] = {}
        self._num_waiting = 0  # bytes, about
        self._failure: PegboardError | None = None
        self._closed = False
        self._wake = asyncio.Event()

    def push(self, delta: SequenceDelta) -> None:
        """Hands a delta to the reader."""
        self.progress.add(delta)
        if self._failure is not None:
            return
        if delta.finish_reason in ("error", "abort"):
            self._fail(EngineError(delta.error or "the engine gave the request up"))
            return
        if delta.finish_reason is not None:
            self._num_open[delta.request_id] -= 1
            if not self._num_open[delta.request_id]:
                del self._num_open[delta.request_id]
        sequence = (delta.request_id, delta.index)
        if sequence not in self._waiting:
            self._waiting[sequence] = JoinedDeltas()
        self._waiting[sequence].add(delta)
        self._num_waiting += _size(delta)
        self._wake.set()
        if self._num_waiting > MAX_WAITING:
            self._waiting.clear()
            self._fail(EngineError("the client reads too slowly, and its requests were given up"))

    def fail(self, error: PegboardError) -> None:
        """Ends the iteration with an error, after the deltas that came before."""
        if self._num_open and self._failure is None:
            self._failure = error
            self._wake.set()

    def close(self) -> None:
        """Aborts the requests that have not finished. Idempotent, and never waits."""
        if not self._closed:
            self._closed = True
            self._on_close(self, tuple(self._num_open))

    async def first(self) -> None:
        """Waits until something has arrived, and leaves it for the iteration.

        Raises:
            PegboardError: the requests failed before they brought anything.
        """
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            self._wake.clear()
            await self._wake.wait()

    def __aiter__(self) -> Submission:
        return self

    async def __anext__(self) -> SequenceDelta:
        if not self._waiting and self._failure is None and not self._num_open:
            raise StopAsyncIteration
        await self.first()
        delta = self._waiting.pop(next(iter(self._waiting))).delta()
        self._num_waiting -= _size(delta)
        return delta

    def _fail(self, error: PegboardError) -> None:
        """One sequence's failure ends them all."""
        self._failure = error
        self._wake.set()
        self.close()


def _size(delta: SequenceDelta) -> int:
    """Bytes of memory, about, of the fields that grow with the answer."""
    return (
        4 * len(delta.text)
        + 32 * len(delta.token_ids)
        + sum(100 + 64 * len(entry.top_ids) for entry in delta.logprobs or ())
    )
