"""The most that an engine will have to do, for functions that estimate memory without torch.

A manifest entry may name `estimate(workload) -> int`: bytes that the part will hold beside weights and
KV. Each estimate is a line of the memory ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pegboard.interfaces.model import ModelShape

MAX_LOGPROBS_BYTES = 8 * 2**20
"""Bytes of logits, in float32, that are taken at a time to make logprobs of them."""

MIN_LOGPROBS_ROWS = 8
"""Rows of logits taken at least."""


def logprobs_rows(vocab_size: int) -> int:
    """Rows of logits that exist at a time where logprobs of many places are asked for."""
    return max(MIN_LOGPROBS_ROWS, MAX_LOGPROBS_BYTES // (4 * vocab_size))


@dataclass(frozen=True, slots=True)
class Workload:
    """The largest step and the longest sequence.

    Attributes:
        shape: the model.
        dtype: activation dtype.
        device: `cpu` or `cuda`.
        max_num_seqs: rows.
        max_num_batched_tokens: tokens a step.
        max_model_len: tokens a row.
        num_speculative_tokens: most draft nodes a row; 0: no speculation.
        options: the part's own, as its model validated them; None: it takes none.
    """

    shape: ModelShape
    dtype: str
    device: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_speculative_tokens: int
    options: Any = None
