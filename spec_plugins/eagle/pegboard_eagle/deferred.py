"""Rows for which nothing is asked wait with their newest tokens until the end of a block: where a policy
drafts nothing, the head runs once a block, not once a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from pegboard.interfaces.drafter import Observation
from pegboard.step import Bool, Int32, Int64, read_only
from pegboard_eagle.memory import MAX_WAITING
from pegboard_eagle.nodes import offsets_of


class Deferred:
    """Tokens that were observed and not computed yet, of the block that each row is in. A block that is
    full has all of its rows, and so has a prompt that siblings are forked from."""

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self._block_size = block_size
        self._counts: Int64 = np.zeros(max_num_seqs, np.int64)
        self._token_ids: Int32 = np.zeros((max_num_seqs, MAX_WAITING), np.int32)
        self._taps: dict[int, torch.Tensor] = {}

    def admit(self, row: int) -> None:
        """A sequence took a row."""
        self._counts[row] = 0

    def due(self, seen: Observation) -> Observation | None:
        """The rows of a step that are computed now, with the tokens that waited; None: none. Those of
        the others wait."""
        counts, num_next = np.diff(seen.offsets), np.diff(seen.next_offsets)
        last = seen.positions[seen.offsets[1:] - 1]
        is_due = (seen.propose > 0) | (num_next == 0) | (counts > 1)
        is_due |= last % self._block_size == self._block_size - 1
        is_due |= self._counts[seen.rows] == MAX_WAITING
        if is_due.all() and not self._counts[seen.rows].any():
            return seen
        if not is_due.all():
            self._wait(seen, np.flatnonzero(~is_due))
        return self._merged(seen, is_due) if is_due.any() else None

    def _wait(self, seen: Observation, which: Int64) -> None:
        """Each has one token."""
        rows, at = seen.rows[which], seen.offsets[which]
        places = self._counts[rows]
        self._token_ids[rows, places] = seen.token_ids[at]
        of, to = _tensor(at), (_tensor(rows), _tensor(places))
        for tap, states in seen.taps.items():
            if tap not in self._taps:
                size = (*self._token_ids.shape, states.shape[1])
                self._taps[tap] = states.new_zeros(size)
            self._taps[tap].index_put_(
                tuple(index.to(states.device) for index in to), states[of.to(states.device)]
            )
        self._counts[rows] += 1

    def _merged(self, seen: Observation, is_due: Bool) -> Observation:
        which = np.flatnonzero(is_due)
        rows, waited = seen.rows[which], self._counts[seen.rows[which]]
        counts = np.diff(seen.offsets)[which]
        offsets = offsets_of(waited + counts)
        owner = np.repeat(np.arange(len(which)), waited + counts)
        place = np.arange(len(owner)) - offsets[owner]  # among the row's tokens
        is_old = place < waited[owner]
        at = np.where(is_old, 0, seen.offsets[which][owner] + place - waited[owner])
        old = (rows[owner], np.where(is_old, place, 0))
        starts = seen.positions[seen.offsets[which]] - waited
        self._counts[rows] = 0
        next_counts = np.diff(seen.next_offsets)[which]
        next_at = np.flatnonzero(np.repeat(is_due, np.diff(seen.next_offsets)))
        token_ids = np.where(is_old, self._token_ids[old], seen.token_ids[at])
        return Observation(
            rows=read_only(rows),
            offsets=read_only(offsets),
            token_ids=read_only(token_ids.astype(np.int32)),
            positions=read_only((starts[owner] + place).astype(np.int32)),
            taps=self._merged_taps(seen.taps, is_old, at, old),
            next_offsets=read_only(offsets_of(next_counts)),
            next_token_ids=read_only(seen.next_token_ids[next_at]),
            propose=read_only(seen.propose[which]),
            num_cached=read_only(seen.num_cached[which]),
            block_tables=tuple(read_only(table[which]) for table in seen.block_tables),
        )

    def _merged_taps(
        self,
        taps: Mapping[int, torch.Tensor],
        is_old: Bool,
        at: Int64,
        old: tuple[Int32, Int64],
    ) -> dict[int, torch.Tensor]:
        merged = {}
        for tap, states in taps.items():
            device = states.device
            one = states[_tensor(at).to(device)]
            if is_old.any():
                rows, places = (_tensor(index[is_old]).to(device) for index in old)
                one[_tensor(np.flatnonzero(is_old)).to(device)] = self._taps[tap][rows, places]
            merged[tap] = one
        return merged


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))
