"""The features that rows, blocks and prompts end with: what the row after them needs."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import numpy as np
import torch

from pegboard.interfaces.drafter import Observation
from pegboard.step import Int32, RowAdmission


class Features:
    """A token's row in the head's KV is made of the feature of the token before it. Behind tokens that a
    cache or a fork served that one is not observed: it is kept with the block that ends there, as long
    as the block holds what it did, or, where a prompt's siblings are forked, with the prompt.

    Attributes:
        num_missing: hits whose last feature was not kept: zeros stood in.
    """

    def __init__(
        self, max_num_seqs: int, num_blocks: int, block_size: int, of: torch.Tensor
    ) -> None:
        """
        Args:
            num_blocks, block_size: of the head's KV group.
            of: [any, size], such as features are.
        """
        self.num_missing = 0
        self._block_size = block_size
        self._last = of.new_zeros(max_num_seqs, of.shape[1])
        self._of_blocks = of.new_zeros(num_blocks, of.shape[1])
        self._is_kept = np.zeros(num_blocks, np.bool_)
        self._prompt_end = np.full(max_num_seqs, -1, np.int64)
        self._prompts: dict[int, bytes] = {}
        self._of_prompts: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._most_prompts = 2 * max_num_seqs

    def admit(self, admission: RowAdmission, table: Int32) -> None:
        """A sequence took a row, with its blocks."""
        known, row = admission.num_cached, admission.row
        self._last[row] = 0
        if known:
            found = self._found(admission.token_ids[:known], table)
            self.num_missing += found is None
            if found is not None:
                self._last[row] = found
        # Siblings are forked where all of the prompt but its last token is computed.
        prompt = admission.token_ids[: max(0, admission.num_prompt_tokens - 1)]
        self._prompt_end[row] = len(prompt) - 1
        self._prompts[row] = _key(prompt)

    def release(self, row: int) -> None:
        """The row is given back."""
        self._prompts.pop(row, None)
        self._prompt_end[row] = -1

    def before(self, seen: Observation, features: torch.Tensor) -> torch.Tensor:
        """Keeps what was observed.

        Args:
            features: [N, size], of the tokens that were observed.

        Returns:
            [R, size], the feature before the first token observed of each row; zeros where there is none.
        """
        rows = torch.from_numpy(seen.rows.astype(np.int64)).to(features.device)
        before = self._last[rows]
        self._last[rows] = _at(features, seen.offsets[1:] - 1)
        self._keep_blocks(seen, features)
        self._keep_prompts(seen, features)
        return before

    def _keep_blocks(self, seen: Observation, features: torch.Tensor) -> None:
        within = seen.positions % self._block_size
        begins, ends = within == 0, within == self._block_size - 1
        if not (begins.any() or ends.any()):
            return
        owner = np.repeat(np.arange(len(seen.rows)), np.diff(seen.offsets))
        blocks = seen.block_tables[0][owner, seen.positions // self._block_size]
        self._is_kept[blocks[begins]] = False
        if ends.any():
            at = np.flatnonzero(ends)
            full = torch.from_numpy(blocks[at].astype(np.int64)).to(features.device)
            self._of_blocks[full] = _at(features, at)
            self._is_kept[blocks[at]] = True

    def _keep_prompts(self, seen: Observation, features: torch.Tensor) -> None:
        at = self._prompt_end[seen.rows] - seen.positions[seen.offsets[:-1]]
        for i in np.flatnonzero((at >= 0) & (at < np.diff(seen.offsets))).tolist():
            key = self._prompts[int(seen.rows[i])]
            self._of_prompts[key] = features[int(seen.offsets[i] + at[i])].clone()
            self._of_prompts.move_to_end(key)
            if len(self._of_prompts) > self._most_prompts:
                self._of_prompts.popitem(last=False)

    def _found(self, token_ids: Int32, table: Int32) -> torch.Tensor | None:
        """The feature of the last of the tokens that were served."""
        if len(token_ids) % self._block_size == 0:
            block = int(table[len(token_ids) // self._block_size - 1])
            if self._is_kept[block]:
                return self._of_blocks[block]
        return self._of_prompts.get(_key(token_ids))


def _key(token_ids: Int32) -> bytes:
    return blake2b(token_ids.tobytes(), digest_size=16).digest()


def _at(features: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    return features[torch.from_numpy(index.astype(np.int64)).to(features.device)]
