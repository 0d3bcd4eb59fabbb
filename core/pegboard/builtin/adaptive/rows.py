"""What the policy keeps of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pegboard.builtin.adaptive.acceptance import Ints, RowOdds, classes_of
from pegboard.builtin.adaptive.drafted import Drafted, is_chain, tree_chances
from pegboard.interfaces.speculation_policy import DraftView

_FIRST_SLOTS = 64


class Shown:
    """The rows of a step, as arrays.

    Attributes:
        rows: as they came.
        tried, accepted: int64 [R], so far.
        held: int64 [R], nodes that may be verified.
        limit: int64 [R], most nodes to ask for.
    """

    def __init__(self, rows: Sequence[DraftView], most: int) -> None:
        self.rows = rows
        self.seq_ids, num_drafts, _, _, tried, accepted, left, limit = zip(*rows, strict=True)
        self.tried, self.accepted = np.array([tried, accepted], np.int64)
        # A step brings a token beside the drafts.
        num_left = np.array(left, np.int64) - 1
        self.limit = np.minimum(np.minimum(np.array(limit, np.int64), most), num_left - 1)
        self.held = np.minimum(np.minimum(np.array(num_drafts, np.int64), most), num_left)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the nodes that were verified last, for the rows that verified some.

    Attributes:
        slots: int64 [R].
        tried, accepted: int64 [R], depths.
        classes: int64 [R, K], of the chance at each depth; -1: not verified.
        is_tree: bool [R].
    """

    slots: Ints
    tried: Ints
    accepted: Ints
    classes: Ints
    is_tree: NDArray[np.bool_]


class RowStates:
    """Arrays by slot; a row has a slot as long as it is shown.

    Attributes:
        odds: of the slots' rows.
        asked: int64 [slots], nodes that were asked for last.
        awaits: whether there were nodes to verify whose outcome is not known yet.
    """

    def __init__(self, most: int) -> None:
        self.awaits = False
        self.odds = RowOdds(_FIRST_SLOTS)
        self.asked: Ints = np.zeros(_FIRST_SLOTS, np.int64)
        self._most = most
        self._slots: dict[int, int] = {}
        self._free = list(range(_FIRST_SLOTS))
        self._tried, self._accepted = np.zeros((2, _FIRST_SLOTS), np.int64)
        self._is_tree = np.zeros(_FIRST_SLOTS, np.bool_)
        self._classes: Ints = np.full((_FIRST_SLOTS, most), -1, np.int64)

    def slots(self, shown: Shown) -> Ints:
        """The rows' slots."""
        known = self._slots
        if len(known) > 2 * len(shown.rows) + _FIRST_SLOTS:
            self._forget(shown)
        try:
            found = [known[seq_id] for seq_id in shown.seq_ids]
        except KeyError:
            found = [self._slot(row) for row in shown.rows]
        return np.array(found, np.int64)

    def outcome(self, shown: Shown, slots: Ints) -> Outcome | None:
        """What became of the nodes that these rows verified; None: they verified none."""
        self.awaits = False
        more = np.minimum(shown.tried - self._tried[slots], self._most)
        # Whatever is shown, no row has accepted less than nothing, or more than was tried.
        right = np.minimum(np.maximum(shown.accepted - self._accepted[slots], 0), more)
        self._tried[slots], self._accepted[slots] = shown.tried, shown.accepted
        (some,) = ((more > 0) & (self._classes[slots, 0] >= 0)).nonzero()
        if not len(some):
            return None
        at = slots[some]
        return Outcome(at, more[some], right[some], self._classes[at], self._is_tree[at])

    def remember(
        self,
        slots: Ints,
        rows: Sequence[DraftView],
        drafts: Drafted,
        verify: Ints,
        power: float,
    ) -> None:
        """Keeps what rows that hold drafts verify of them."""
        self.awaits = True
        kept = np.arange(self._most) < np.minimum(verify, drafts.num_depths)[:, None]
        self._classes[slots] = np.where(kept, drafts.classes, -1)
        self._is_tree[slots] = False
        if drafts.depths is None:
            return
        for slot, row, count in zip(slots.tolist(), rows, verify.tolist(), strict=True):
            if count and not is_chain(row.parents):
                # The chances of its depths are those of the nodes that are verified.
                self._is_tree[slot] = True
                chances, _, _ = tree_chances(row, count, power)
                self._classes[slot, : len(chances)] = classes_of(chances)
                self._classes[slot, len(chances) :] = -1

    def _slot(self, row: DraftView) -> int:
        slot = self._slots.get(row.seq_id)
        if slot is None:
            if not self._free:
                self._widen()
            slot = self._slots[row.seq_id] = self._free.pop()
            self.odds.clear(slot)
            self._tried[slot], self._accepted[slot] = row.num_tried, row.num_accepted
            self._classes[slot] = -1
            self.asked[slot] = 0
        return slot

    def _forget(self, shown: Shown) -> None:
        """Gives back the slots of rows that are not shown."""
        now = set(shown.seq_ids)
        for seq_id in [seq_id for seq_id in self._slots if seq_id not in now]:
            self._free.append(self._slots.pop(seq_id))

    def _widen(self) -> None:
        """Twice as many slots."""
        size = len(self.asked)
        self._free = list(range(size, 2 * size))
        self.odds.widen(size)
        for name in ("asked", "_tried", "_accepted"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(size, np.int64)]))
        self._is_tree = np.concatenate([self._is_tree, np.zeros(size, np.bool_)])
        self._classes = np.concatenate([self._classes, np.full_like(self._classes, -1)])
