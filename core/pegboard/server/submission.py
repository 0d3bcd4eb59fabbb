"""The requests of one HTTP call, from the moment the engine is given them until all have ended."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from pegboard.errors import EngineError, PegboardError
from pegboard.request import Request, SequenceDelta


class Submission:
    """An async iterator over the deltas of some requests, in order of arrival.

    It ends when every sequence has finished, and raises what ended it early: a `RequestError` when
    the engine refused the requests, an `EngineError` when a sequence failed or the engine died.

    Args:
        requests: what was submitted together.
        on_close: called once by `close`, with the ids of the requests that had not finished.
    """

    def __init__(
        self, requests: Sequence[Request], on_close: Callable[[Submission, tuple[str, ...]], None]
    ) -> None:
        self.requests = tuple(requests)
        self._num_open = {request.request_id: request.params.n for request in requests}
        self._on_close = on_close
        self._waiting: deque[SequenceDelta] = deque()
        self._failure: PegboardError | None = None
        self._closed = False
        self._wake = asyncio.Event()

    def push(self, delta: SequenceDelta) -> None:
        """Hands a delta to the reader."""
        if delta.finish_reason is not None:
            self._num_open[delta.request_id] -= 1
            if not self._num_open[delta.request_id]:
                del self._num_open[delta.request_id]
        self._waiting.append(delta)
        self._wake.set()

    def fail(self, error: PegboardError) -> None:
        """Ends the iteration with an error, once what came before has been read."""
        if self._num_open and self._failure is None:
            self._failure = error
            self._wake.set()

    def close(self) -> None:
        """Aborts what has not finished. Idempotent, and never waits."""
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
        delta = self._waiting.popleft()
        if delta.finish_reason in ("error", "abort"):
            raise EngineError(delta.error or "the engine gave the request up")
        return delta
