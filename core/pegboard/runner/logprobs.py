"""Logprobs of the model's own distribution: float32, before processors, filters and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.step import Float32, Int32, Logprobs

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Entries:
    """Logprobs of some positions, without their rows; as in `step.Logprobs`."""

    token_ids: Int32
    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32


def entries(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Entries:
    """The logprob and rank of a token at each position, and the `num_top` most likely ones.

    Args:
        logits: float32 [num_positions, vocab_size], raw.
        token_ids: int64 [num_positions].
        num_top: at least 0.
    """
    num_top = min(num_top, logits.shape[1])
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = token_ids[:, None]
    ranks = (logits > logits.gather(1, chosen)).sum(dim=1) + 1
    top_ids = _largest(logits, num_top)
    return Entries(
        token_ids=_int32(token_ids),
        logprobs=logprobs.gather(1, chosen)[:, 0].cpu().numpy(),
        ranks=_int32(ranks),
        top_ids=_int32(top_ids),
        top_logprobs=logprobs.gather(1, top_ids).cpu().numpy(),
    )


def join(parts: Sequence[Entries], counts: Int64) -> Logprobs:
    """The message of entries that follow each other, `counts[i]` of them the i-th row's."""
    return Logprobs(
        offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )


def _largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the largest logits of each row, best first, equal ones by lower id."""
    if count == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    ids = torch.topk(logits, count).indices.sort(dim=1).values
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    # top-k is free to choose among ids that tie for the last places.
    tied = (logits >= logits.gather(1, ids[:, -1:])).sum(dim=1) > count
    if bool(tied.any()):
        ids[tied] = logits[tied].sort(dim=1, descending=True, stable=True).indices[:, :count]
    return ids


def _int32(values: torch.Tensor) -> Int32:
    return values.to(torch.int32).cpu().numpy()
