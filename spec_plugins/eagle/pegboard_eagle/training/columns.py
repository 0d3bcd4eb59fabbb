"""Answers as the tensors that a head is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pegboard_eagle.training.answers import Answer

NOT_DRAWN = -1
"""In place of a draft id: the head does not guess the token."""


@dataclass(frozen=True, slots=True)
class Columns:
    """B texts, padded to T tokens and to C columns of their answers.

    Column c of a text with P tokens of a prompt is that of its token P - 1 + c. What it needs at step i of
    the unrolled head stands at c + i.

    Attributes:
        taps: float32 [B, T, num_taps * hidden_size].
        embedded: float32 [B, T, hidden_size]: at t the embedding of token t + 1.
        at: int64 [B, C], the columns' tokens in their texts.
        counts: int64 [B], columns of each text.
        answers: float32 [B, C, hidden_size]: at c the embedding of token P + c.
        features: float32 [B, C, hidden_size]: at c the target's feature of token P + c.
        guesses: int64 [B, C]: at c the draft id of token P + c + 1; NOT_DRAWN: it has none.
    """

    taps: torch.Tensor
    embedded: torch.Tensor
    at: torch.Tensor
    counts: torch.Tensor
    answers: torch.Tensor
    features: torch.Tensor
    guesses: torch.Tensor

    def within(self, step: int) -> torch.Tensor:
        """bool [B, C]: whether a column's text reaches as far as its guess at a step."""
        return torch.arange(self.at.shape[1]) + step < self.counts[:, None]


def columns(answers: Sequence[Answer], embedding: torch.Tensor, draft_ids: torch.Tensor) -> Columns:
    """The columns of answers of at least two tokens.

    Args:
        embedding: float32 [target's vocabulary, hidden_size].
        draft_ids: int64 [target's vocabulary], the draft's id of each token, or NOT_DRAWN.
    """
    counts = [one.num_new - 1 for one in answers]
    tokens = [one.token_ids.long() for one in answers]
    starts = torch.tensor([one.num_prompt_tokens - 1 for one in answers])
    new = [ids[one.num_prompt_tokens :] for ids, one in zip(tokens, answers, strict=True)]
    width = torch.arange(max(counts))
    limit = torch.tensor(counts)[:, None] - 1
    return Columns(
        taps=_padded([one.taps[:-1].float() for one in answers]),
        embedded=_padded([embedding[ids[1:-1]] for ids in tokens]),
        at=starts[:, None] + width.minimum(limit),
        counts=torch.tensor(counts),
        answers=_padded([embedding[ids[:-1]] for ids in new]),
        features=_padded([one.features[one.num_prompt_tokens :].float() for one in answers]),
        guesses=_padded([draft_ids[ids[1:]] for ids in new]),
    )


def _padded(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
