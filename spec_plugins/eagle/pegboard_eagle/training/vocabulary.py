"""The tokens that a head draws: those that the target writes most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pegboard_eagle.training.answers import Answer
from pegboard_eagle.training.columns import NOT_DRAWN
from pegboard_eagle.training.target import Target


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a head draws, and the target's matrices.

    Attributes:
        token_ids: int64 [draft vocabulary], ascending.
        draft_ids: int64 [target's vocabulary], the inverse; NOT_DRAWN for others.
        embedding: float32 [target's vocabulary, hidden_size].
        rows: float32 [draft vocabulary, hidden_size], of the target's head.
        coverage: share of the answers' tokens that it holds.
    """

    token_ids: torch.Tensor
    draft_ids: torch.Tensor
    embedding: torch.Tensor
    rows: torch.Tensor
    coverage: float


def vocabulary(target: Target, shards: Iterable[list[Answer]], most: int) -> Vocabulary:
    """The most frequent tokens of the answers; then those of the prompts, and then the lowest ids."""
    size = target.shape.vocab_size
    written, asked = torch.zeros(2, size, dtype=torch.int64)
    for shard in shards:
        for one in shard:
            ids = one.token_ids.long()
            written += torch.bincount(ids[one.num_prompt_tokens :], minlength=size)
            asked += torch.bincount(ids[: one.num_prompt_tokens], minlength=size)
    order = sorted(range(size), key=lambda i: (-int(written[i]), -int(asked[i]), i))
    token_ids = torch.tensor(sorted(order[:most]))
    draft_ids = torch.full((size,), NOT_DRAWN)
    draft_ids[token_ids] = torch.arange(len(token_ids))
    coverage = float(written[token_ids].sum()) / max(int(written.sum()), 1)
    return Vocabulary(
        token_ids, draft_ids, target.embedding, target.rows[token_ids].clone(), coverage
    )
