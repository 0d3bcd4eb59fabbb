"""Sequences that wait for the engine: no delta of them has come yet."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.request import Request, SequenceDelta


def num_sequences(requests: Sequence[Request]) -> int:
    """Sequences that the requests ask for."""
    return sum(request.params.n for request in requests)


def num_tokens(requests: Sequence[Request]) -> int:
    """Tokens of their prompts; each sequence's counts."""
    return sum(len(request.prompt_token_ids) * request.params.n for request in requests)


class Waiting:
    """The open requests' sequences before their first token.

    Attributes:
        num_sequences: how many there are.
        num_tokens: tokens of their prompts.
    """

    def __init__(self) -> None:
        self.num_sequences = 0
        self.num_tokens = 0
        self._indices: dict[str, set[int]] = {}
        self._num_prompt_tokens: dict[str, int] = {}

    def add(self, request: Request) -> None:
        """All sequences of a request wait."""
        self._indices[request.request_id] = set(range(request.params.n))
        self._num_prompt_tokens[request.request_id] = len(request.prompt_token_ids)
        self._count(request.request_id, request.params.n)

    def begin(self, delta: SequenceDelta) -> None:
        """A sequence has brought something."""
        indices = self._indices.get(delta.request_id, set())
        if delta.index in indices:
            indices.remove(delta.index)
            self._count(delta.request_id, -1)

    def forget(self, request_id: str) -> None:
        """A request has ended. Idempotent."""
        if request_id in self._indices:
            self._count(request_id, -len(self._indices.pop(request_id)))
            del self._num_prompt_tokens[request_id]

    def _count(self, request_id: str, num_sequences: int) -> None:
        self.num_sequences += num_sequences
        self.num_tokens += num_sequences * self._num_prompt_tokens[request_id]
