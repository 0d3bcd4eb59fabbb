"""The features that rows, blocks and prompts end with: what the row after them needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pegboard.interfaces.drafter import Observation
from pegboard.step import Int32, RowAdmission


@dataclass(slots=True)
class _Prompt:
    """A row's prompt but for its last token, where siblings are forked, and the feature that it ends with;
    None: not computed yet."""

    token_ids: Int32
    feature: torch.Tensor | None = None


class Features:
    """A token's row in the head's KV is made of the feature of the token before it. Behind tokens that a
    cache or a fork served that one is not observed: it is kept with the block that ends there, as long
    as the block holds what it did, or with the sibling's prompt.

    Attributes:
        num_missing: hits whose last feature was not kept: zeros stood in.
    """

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self.num_missing = 0
        self._block_size = block_size
        self._prompts: dict[int, _Prompt] = {}
        self._last: dict[int, torch.Tensor | None] = dict.fromkeys(range(max_num_seqs))
        self._of_blocks: dict[int, torch.Tensor] = {}

    def admit(self, admission: RowAdmission, table: Int32) -> None:
        """A sequence took a row, with its blocks."""
        known, row = admission.num_cached, admission.row
        token_ids = admission.token_ids
        self._last[row] = None
        if known:
            self._last[row] = self._found(token_ids[:known], table)
            self.num_missing += self._last[row] is None
        prompt = token_ids[: max(0, admission.num_prompt_tokens - 1)]
        # A fork's siblings may be forked from it in turn.
        self._prompts[row] = _Prompt(prompt, self._last[row] if known == len(prompt) else None)

    def release(self, row: int) -> None:
        """The row is given back."""
        self._prompts.pop(row, None)
        self._last[row] = None

    def before(self, seen: Observation, features: torch.Tensor) -> torch.Tensor:
        """Keeps what was observed.

        Args:
            features: [N, size], of the tokens that were observed.

        Returns:
            [R, size], the feature before the first token observed of each row; zeros where there is none.
        """
        none = features.new_zeros(features.shape[1])
        lasts = [self._last[row] for row in seen.rows.tolist()]
        before = torch.stack([none if last is None else last for last in lasts])
        for i, row in enumerate(seen.rows.tolist()):
            self._last[row] = features[seen.offsets[i + 1] - 1].clone()
        self._keep_blocks(seen, features)
        self._keep_prompts(seen, features)
        return before

    def _keep_blocks(self, seen: Observation, features: torch.Tensor) -> None:
        within = seen.positions % self._block_size
        owner = np.repeat(np.arange(len(seen.rows)), np.diff(seen.offsets))
        blocks = seen.block_tables[0][owner, seen.positions // self._block_size]
        for block in blocks[within == 0].tolist():
            self._of_blocks.pop(block, None)  # it begins anew
        for at in np.flatnonzero(within == self._block_size - 1).tolist():
            self._of_blocks[int(blocks[at])] = features[at].clone()

    def _keep_prompts(self, seen: Observation, features: torch.Tensor) -> None:
        starts = seen.positions[seen.offsets[:-1]]
        for i, row in enumerate(seen.rows.tolist()):
            prompt = self._prompts[row]
            at = len(prompt.token_ids) - 1 - int(starts[i])
            if 0 <= at < seen.offsets[i + 1] - seen.offsets[i]:
                prompt.feature = features[int(seen.offsets[i]) + at].clone()

    def _found(self, token_ids: Int32, table: Int32) -> torch.Tensor | None:
        """The feature of the last of the tokens that were served."""
        if len(token_ids) % self._block_size == 0:
            block = int(table[len(token_ids) // self._block_size - 1])
            if block in self._of_blocks:
                return self._of_blocks[block]
        for prompt in self._prompts.values():
            if prompt.feature is not None and np.array_equal(prompt.token_ids, token_ids):
                return prompt.feature
        return None
