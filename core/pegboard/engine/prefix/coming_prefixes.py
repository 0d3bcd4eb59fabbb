"""Beginnings that are being computed right now, for which other sequences had better wait."""

from __future__ import annotations

from collections.abc import Container, Iterable

from pegboard.engine.prefix.prefixes import Prefixes
from pegboard.engine.sequence import Sequence

MIN_TOKENS = 32
"""Fewest tokens that are worth a wait: computing them costs about as much as one more step."""


class ComingPrefixes:
    """The sequences that compute known tokens in a step, whose blocks others may begin with.

    Nobody waits for ever: a running sequence computes the awaited tokens, and once it is past them
    their blocks are known or lost.

    Args:
        computing: those sequences, and the token at which each starts.
        preempted: see `Forks.parent`.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        computing: Iterable[tuple[Sequence, int]],
        preempted: Container[int],
    ) -> None:
        self._prefixes = prefixes
        self._preempted = preempted
        self._computing = {seq.seq_id: (seq, start) for seq, start in computing}

    def add(self, seq: Sequence, start: int) -> None:
        """Adds a sequence that computes from token `start` on."""
        self._computing[seq.seq_id] = (seq, start)

    def discard(self, seq_id: int) -> None:
        """Drops a preempted sequence."""
        self._computing.pop(seq_id, None)

    def serve(self, seq: Sequence) -> bool:
        """Whether the next tokens that a waiting sequence lacks are among them."""
        if not self._computing:
            return False
        num_ready = self._prefixes.num_ready(seq, self._preempted)
        if num_ready < seq.num_prompt - 1 and self._prefixes.forks.may_fork(seq):
            siblings = (it for it, _ in self._computing.values() if it.owner is seq.owner)
            if any(not sibling.is_outdated for sibling in siblings):
                return True
        if not self._prefixes.reads(seq):
            return False
        stride = self._prefixes.stride
        end = -(-(num_ready + max(MIN_TOKENS, stride)) // stride) * stride
        return end < seq.num_known and any(
            start < end <= other.num_known
            and self._prefixes.publishes(other)
            and self._prefixes.begin_alike(seq, other, end)
            for other, start in self._computing.values()
        )
