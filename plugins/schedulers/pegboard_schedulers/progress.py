"""Service, read off the queue: tokens that came since the last look, and sequences that left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pegboard.interfaces.scheduler import QueueView, SequenceView


@dataclass(slots=True)
class Seen:
    """A sequence that was admitted once, as it was last seen."""

    tenant: str
    num_output: int


@dataclass(frozen=True, slots=True)
class Served:
    """Output tokens that a sequence got.

    Attributes:
        tenant: whose it is.
        num_new: tokens since the last look.
        num_output: tokens in all.
        has_left: whether it is gone.
    """

    tenant: str
    num_new: int
    num_output: int
    has_left: bool


class Progress:
    """Follows sequences from their first admission to their end.

    A sequence that has left the queue is taken to have ended with one token more than was last seen:
    its last step is never shown. An abort looks the same.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}

    def __contains__(self, seq: SequenceView) -> bool:
        """Whether it has been admitted before."""
        return seq.seq_id in self._seen

    def follow(self, seq: SequenceView) -> None:
        """From now on; once."""
        self._seen[seq.seq_id] = Seen(seq.tenant, seq.num_output)

    def begin(self, queue: QueueView) -> None:
        """Begins anew: follows those that run, and no tokens of theirs are new."""
        self._seen = {seq.seq_id: Seen(seq.tenant, seq.num_output) for seq in queue.running}

    def look(self, queue: QueueView) -> Iterator[Served]:
        """The events since the last look; read it to its end."""
        running = {seq.seq_id for seq in queue.running}
        gone = self._seen.keys() - running
        if gone:
            gone.difference_update(seq.seq_id for seq in queue.waiting)
        for seq_id in gone:
            seen = self._seen.pop(seq_id)
            yield Served(seen.tenant, 1, seen.num_output + 1, has_left=True)
        for seq in queue.running:
            seen_now, num_output = self._seen.get(seq.seq_id), seq.num_output
            if seen_now is not None and num_output > seen_now.num_output:
                num_new = num_output - seen_now.num_output
                seen_now.num_output = num_output
                yield Served(seen_now.tenant, num_new, num_output, has_left=False)
