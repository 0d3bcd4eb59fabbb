"""What the policy keeps of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pegboard.builtin.adaptive.acceptance import Ints, RowOdds, classes_of, tree_chances
from pegboard.builtin.adaptive.drafted import Drafted, is_chain
from pegboard.interfaces.speculation_policy import DraftView

_FIRST_SLOTS = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the nodes that were verified last, for the rows that verified some.

    Attributes:
        slots: int64 [R].
        tried, accepted: int64 [R], depths.
        classes: int64 [R, K], of the chance at each depth; -1: not verified.
    """

    slots: Ints
    tried: Ints
    accepted: Ints
    classes: Ints


class RowStates:
    """Arrays by slot; a row has a slot as long as it is shown.

    Attributes:
        odds: of the slots' rows.
        asked: nodes that were asked for last.
        last_tried: the step that verified some of the row last.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._slots: dict[int, int] = {}
        self._free = list(range(_FIRST_SLOTS))
        self.odds = RowOdds(_FIRST_SLOTS)
        self.asked: Ints = np.zeros(_FIRST_SLOTS, np.int64)
        self.last_tried: Ints = np.zeros(_FIRST_SLOTS, np.int64)
        self._tried: Ints = np.zeros(_FIRST_SLOTS, np.int64)
        self._accepted: Ints = np.zeros(_FIRST_SLOTS, np.int64)
        self._classes: Ints = np.full((_FIRST_SLOTS, most), -1, np.int64)
        self._awaited = False
        self._step = 0

    def slots(self, rows: Sequence[DraftView]) -> Ints:
        """The rows' slots."""
        self._step += 1
        known = self._slots
        if len(known) > 2 * len(rows) + _FIRST_SLOTS:
            self._forget(rows)
        try:
            found = [known[row.seq_id] for row in rows]
        except KeyError:
            found = [self._slot(row) for row in rows]
        return np.array(found, np.int64)

    def outcome(self, rows: Sequence[DraftView], slots: Ints) -> Outcome | None:
        """What became of the nodes that these rows verified; None: they verified none."""
        if not self._awaited:
            return None
        self._awaited = False
        tried = np.array([row.num_tried for row in rows], np.int64)
        accepted = np.array([row.num_accepted for row in rows], np.int64)
        more = np.minimum(tried - self._tried[slots], self._most)
        # Whatever is shown, no row has accepted less than nothing, or more than was tried.
        right = np.clip(accepted - self._accepted[slots], 0, np.maximum(more, 0))
        self._tried[slots], self._accepted[slots] = tried, accepted
        some = np.flatnonzero((more > 0) & (self._classes[slots, 0] >= 0))
        if not len(some):
            return None
        at = slots[some]
        return Outcome(at, more[some], right[some], self._classes[at])

    def remember(
        self,
        rows: Sequence[DraftView],
        slots: Ints,
        verify: Ints,
        propose: Ints,
        holding: list[int],
        held: Drafted,
    ) -> None:
        """Keeps what was chosen."""
        self.asked[slots] = propose
        if not holding:
            return
        self._awaited = True
        at, counts = slots[holding], verify[holding]
        kept = np.arange(self._most) < np.minimum(counts, held.num_depths)[:, None]
        self._classes[at] = np.where(kept, held.classes, -1)
        for place, index in enumerate(holding):
            row, count = rows[index], int(counts[place])
            if count and not is_chain(row.parents):
                chances, _, _ = tree_chances(row.parents[:count], row.confidences[:count])
                self._classes[at[place], : len(chances)] = classes_of(np.array(chances))
                self._classes[at[place], len(chances) :] = -1
        self.last_tried[at[counts > 0]] = self._step

    def _slot(self, row: DraftView) -> int:
        slot = self._slots.get(row.seq_id)
        if slot is None:
            if not self._free:
                self._widen()
            slot = self._slots[row.seq_id] = self._free.pop()
            self.odds.clear(slot)
            self._tried[slot], self._accepted[slot] = row.num_tried, row.num_accepted
            self._classes[slot] = -1
            self.asked[slot] = self.last_tried[slot] = 0
        return slot

    def _forget(self, rows: Sequence[DraftView]) -> None:
        """Gives back the slots of rows that are not shown."""
        shown = {row.seq_id for row in rows}
        for seq_id in [seq_id for seq_id in self._slots if seq_id not in shown]:
            self._free.append(self._slots.pop(seq_id))

    def _widen(self) -> None:
        size = len(self._tried)
        self._free = list(range(size, 2 * size))
        self.odds.widen(2 * size)
        for name in ("asked", "last_tried", "_tried", "_accepted"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(size, np.int64)]))
        self._classes = np.concatenate([self._classes, np.full_like(self._classes, -1)])
