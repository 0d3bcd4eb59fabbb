"""Logprobs of the model's own distribution: float32, before processors, filters and temperature."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pegboard.interfaces.workload import logprobs_rows
from pegboard.step import Int32, Int64, Logprobs


def logprobs_of(
    logits_of: Callable[[slice], torch.Tensor],
    token_ids: Int64,
    counts: Int64,
    num_top: int,
    vocab_size: int,
) -> Logprobs:
    """The logprob and rank of a token at each place, and the `num_top` most likely ones.

    Args:
        logits_of: raw logits of some places, float32 [num_places, vocab_size]. It is asked for a few
            at a time, and what is made of them is gone before the next.
        token_ids: int64 [num_places], one row after the other.
        counts: int64 [R], places of each row.
        num_top: at least 0.
    """
    num_places, num_top = len(token_ids), min(num_top, vocab_size)
    # All at once: results that lay between those logits would tear the heap to pieces.
    found = Logprobs(
        offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        token_ids=token_ids.astype(np.int32),
        logprobs=np.empty(num_places, np.float32),
        ranks=np.empty(num_places, np.int32),
        top_ids=np.empty((num_places, num_top), np.int32),
        top_logprobs=np.empty((num_places, num_top), np.float32),
    )
    size = logprobs_rows(vocab_size)
    for first in range(0, num_places, size):
        places = slice(first, first + size)
        _fill(found, places, logits_of(places), torch.from_numpy(token_ids[places]))
    return found


def _fill(found: Logprobs, places: slice, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = token_ids.to(logits.device)[:, None]
    top_ids = _largest(logits, found.top_ids.shape[1])
    found.logprobs[places] = logprobs.gather(1, chosen)[:, 0].cpu().numpy()
    found.ranks[places] = _int32((logits > logits.gather(1, chosen)).sum(dim=1) + 1)
    found.top_ids[places] = _int32(top_ids)
    found.top_logprobs[places] = logprobs.gather(1, top_ids).cpu().numpy()


def _largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the largest logits of each row, best first, equal ones by lower id."""
    if count == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    ids = torch.topk(logits, count).indices.sort(dim=1).values
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    # top-k is free to choose among ids that tie for the last places.
    candidates = logits >= logits.gather(1, ids[:, -1:])
    for row in torch.nonzero(candidates.sum(dim=1) > count)[:, 0].tolist():
        tied = torch.nonzero(candidates[row])[:, 0]
        order = logits[row, tied].sort(descending=True, stable=True).indices
        ids[row] = tied[order[:count]]
    return ids


def _int32(values: torch.Tensor) -> Int32:
    return values.to(torch.int32).cpu().numpy()
