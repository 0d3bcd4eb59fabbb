"""The queue: running and waiting sequences, and the rows of the running ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from pegboard.engine.sequence import OpenRequest, Sequence
from pegboard.step import RowRelease


class Queue:
    """All sequences that have not ended. Schedulers see `running` and `waiting` alone."""

    def __init__(self, max_num_seqs: int) -> None:
        self._requests: dict[str, OpenRequest] = {}
        self._sequences: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._released: list[RowRelease] = []
        self._fenced_rows: deque[tuple[int, int]] = deque()

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that own a row, in order of their admission."""
        return tuple(self._running.values())

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """The others, in order of arrival; a preempted one stands where it arrived."""
        return tuple(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(tuple(self._requests.values()))

    def request(self, request_id: str) -> OpenRequest | None:
        return self._requests.get(request_id)

    def sequence(self, seq_id: int) -> Sequence | None:
        return self._sequences.get(seq_id)

    def add(self, request: OpenRequest) -> None:
        """Adds a request; its sequences wait."""
        first = _place(request.sequences[0])
        at = bisect_left(self._waiting, first, key=_place)
        self._waiting[at:at] = request.sequences
        self._sequences.update((seq.seq_id, seq) for seq in request.sequences)
        self._requests[request.request.request_id] = request

    def admit(self, sequences: list[Sequence]) -> None:
        """Gives rows to waiting sequences."""
        if not sequences:
            return
        for seq in sequences:
            seq.row = self._free_rows.pop()
            self._running[seq.seq_id] = seq
        self._waiting = [seq for seq in self._waiting if seq.row is None]

    def preempt(self, seq: Sequence) -> None:
        """Takes the row of a running sequence, which then waits at the place of its arrival."""
        self._release_row(seq, None)
        seq.leave_row()
        seq.num_preemptions += 1
        insort(self._waiting, seq, key=_place)

    def remove(self, seq: Sequence, after_step: int | None = None) -> None:
        """Removes a sequence that has ended, and with its last one the request. With `after_step`, its row
        is free once that step is fenced."""
        del self._sequences[seq.seq_id]
        if seq.row is None:
            del self._waiting[bisect_left(self._waiting, _place(seq), key=_place)]
        else:
            self._release_row(seq, after_step)
            seq.leave_row()
        seq.owner.sequences.remove(seq)
        if not seq.owner.sequences:
            del self._requests[seq.owner.request.request_id]

    def fence(self, step_id: int) -> None:
        """Frees the rows that waited for this step, or an older one, to be committed."""
        while self._fenced_rows and self._fenced_rows[0][0] <= step_id:
            self._free_rows.append(self._fenced_rows.popleft()[1])

    def clear(self) -> None:
        """Removes all sequences, without releases of their rows: the engine has ended."""
        self._requests.clear()
        self._sequences.clear()
        self._running.clear()
        self._waiting.clear()

    def take_released(self) -> tuple[RowRelease, ...]:
        """Rows given back since the last call, with their final token counts."""
        released, self._released = tuple(self._released), []
        return released

    def _release_row(self, seq: Sequence, after_step: int | None) -> None:
        assert seq.row is not None
        del self._running[seq.seq_id]
        if after_step is None:
            self._free_rows.append(seq.row)
        else:
            self._fenced_rows.append((after_step, seq.row))
        self._released.append(RowRelease(seq.row, seq.num_known))


def _place(seq: Sequence) -> tuple[float, int]:
    """Its place among waiting sequences."""
    return seq.arrival, seq.seq_id
