"""Which tokens of its rows the draft model has read, and which it reads next.

It reads what is observed: a prompt at once, since siblings and caches are served with its blocks. Output
for which no guess is asked is read a block at a time, so that a row that is not drafted for costs a pass in
every sixteenth step or so, and not in every one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pegboard.interfaces.drafter import DrafterContext, Observation
from pegboard.step import Int32, Int64, RowAdmission


@dataclass(frozen=True, slots=True)
class Reading:
    """The tokens that the draft model reads in one step.

    Attributes:
        rows: int32 [R], those that read.
        offsets: int32 [R + 1], into `token_ids`.
        num_read: int32 [R], tokens that they have read before.
        token_ids: int64 [N].
        drafted: int64 [D], indices of `rows` that get guesses: the last token they read is the last known.
        num_nodes: int64 [D], most guesses.
    """

    rows: Int32
    offsets: Int32
    num_read: Int32
    token_ids: Int64
    drafted: Int64
    num_nodes: Int64

    @property
    def num_known(self) -> Int64:
        """int64 [D], known tokens of the rows that get guesses."""
        counts = np.diff(self.offsets)
        return (self.num_read + counts)[self.drafted].astype(np.int64)


_NONE: Int64 = np.zeros(0, np.int64)
NOTHING = Reading(
    rows=np.zeros(0, np.int32),
    offsets=np.zeros(1, np.int32),
    num_read=np.zeros(0, np.int32),
    token_ids=_NONE,
    drafted=_NONE,
    num_nodes=_NONE,
)
"""All rows wait."""


class ReadTokens:
    """Keeps account of rows."""

    def __init__(self, context: DrafterContext) -> None:
        assert context.shape is not None
        self._max_position = context.shape.max_position
        self._last_id = context.shape.vocab_size - 1
        has_windows = any(group.window is not None for group in context.groups)
        # What a token attends to may leave a window before the token is read.
        sizes = [1] if has_windows else [group.block_size for group in context.groups]
        self._block_size = min(sizes, default=1)
        self._num_read: Int64 = np.zeros(context.max_num_seqs, np.int64)
        self._num_prompt = np.zeros_like(self._num_read)
        self._num_waiting = np.zeros_like(self._num_read)
        self._waiting: Int32 = np.zeros((context.max_num_seqs, self._block_size), np.int32)

    def admit(self, admission: RowAdmission) -> None:
        """A row begins with what a cache or a fork served."""
        row = admission.row
        self._num_read[row] = admission.num_cached
        self._num_prompt[row] = admission.num_prompt_tokens
        self._num_waiting[row] = 0

    def next(self, seen: Observation) -> Reading:
        """Takes in what was observed, and says what is read now. A row longer than the model's context
        is neither read further nor guessed for."""
        rows = seen.rows
        num_read, num_waiting = self._num_read[rows], self._num_waiting[rows]
        counts = np.diff(seen.offsets).astype(np.int64)
        ends = num_read + num_waiting + counts
        # The last of m guesses is not read: known tokens and m - 1 guesses have positions.
        num_left = np.maximum(self._max_position - ends, 0)
        num_nodes: Int64 = np.minimum(seen.propose, num_left)
        waits = (num_nodes == 0) & (num_read >= self._num_prompt[rows])
        waits &= ends // self._block_size == num_read // self._block_size
        self._keep(seen, np.flatnonzero(waits), counts)
        reads = np.flatnonzero(~waits)
        if not len(reads):
            return NOTHING
        self._num_read[rows[reads]] = ends[reads]
        self._num_waiting[rows[reads]] = 0
        parts = num_waiting[reads], counts[reads], (num_nodes[reads] > 0).astype(np.int64)
        offsets, token_ids = self._joined(seen, reads, *parts)
        return self._within(rows[reads], num_read[reads], offsets, token_ids, num_nodes[reads])

    def _joined(
        self, seen: Observation, reads: Int64, waiting: Int64, observed: Int64, newest: Int64
    ) -> tuple[Int64, Int64]:
        """Offsets and ids of the tokens of the rows that read: so many that waited, those observed, and
        where guesses are asked for the last known one, which is not observed yet."""
        offsets = _starts(waiting + observed + newest)
        token_ids = np.empty(offsets[-1], np.int64)
        at = offsets[:-1]
        if waiting.any():
            rows = np.repeat(seen.rows[reads], waiting)
            theirs = self._waiting[rows, _spans(np.zeros_like(at), waiting)]
            token_ids[_spans(at, waiting)] = theirs
        first = seen.offsets[reads].astype(np.int64)
        token_ids[_spans(at + waiting, observed)] = seen.token_ids[_spans(first, observed)]
        asked = newest > 0
        last = seen.next_offsets[1:][reads][asked] - 1
        token_ids[offsets[1:][asked] - 1] = seen.next_token_ids[last]
        return offsets, token_ids

    def _keep(self, seen: Observation, waiting: Int64, counts: Int64) -> None:
        """Puts what was observed of rows behind what waits already."""
        if not len(waiting):
            return
        rows, counts = seen.rows[waiting], counts[waiting]
        columns = _spans(self._num_waiting[rows], counts)
        observed = seen.token_ids[_spans(seen.offsets[waiting].astype(np.int64), counts)]
        self._waiting[np.repeat(rows, counts), columns] = observed
        self._num_waiting[rows] += counts

    def _within(
        self, rows: Int32, num_read: Int64, offsets: Int64, token_ids: Int64, num_nodes: Int64
    ) -> Reading:
        """Leaves out what the model has no position for, and what it would read nothing of; an id past its
        embedding is read as the last."""
        counts = np.diff(offsets)
        kept = np.clip(self._max_position - num_read, 0, counts)
        if (kept < counts).any():
            token_ids = token_ids[_spans(offsets[:-1], kept)]
        some = kept > 0
        rows, num_read, num_nodes = rows[some], num_read[some], num_nodes[some]
        drafted = np.flatnonzero(num_nodes)
        return Reading(
            rows=rows,
            offsets=_starts(kept[some]).astype(np.int32),
            num_read=num_read.astype(np.int32),
            token_ids=np.minimum(token_ids, self._last_id),
            drafted=drafted,
            num_nodes=num_nodes[drafted].astype(np.int64),
        )


def _starts(counts: Int64) -> Int64:
    """Offsets of ragged rows, int64 [num_rows + 1]."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))


def _spans(first: Int64, counts: Int64) -> Int64:
    """The numbers `first[i]` to `first[i] + counts[i]`, one row after the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()))
