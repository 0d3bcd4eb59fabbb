"""`LogitsProcessor`: what may be sampled.

A manifest entry may name `params`, the pydantic model of the processor's request parameters, and
`fields`, the fields of `SamplingParams` that it serves. The host validates
`SamplingParams.processors[name]` joined with those fields and sends plain values once, at admission;
a row whose values are all defaults is never admitted to the processor, unless the request names it.

Processors run one after the other, each on what the last one left: the built-in ones in alphabetical
order (`logit_bias`, `min_tokens`, `penalties`), then those of the config's `logits_processors` in the
config's order, then objects given in Python in theirs. A built-in that the config names, for its
options, keeps its place, and no request changes the order. Temperature and the filters follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

VERSION = 1


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """The context of a processor's factory.

    Attributes:
        vocab_size: logits a row.
        max_num_seqs: rows.
        device: `cpu` or `cuda`.
        eos_token_ids: ids that end a sequence by themselves.
    """

    vocab_size: int
    max_num_seqs: int
    device: str
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LogitRow:
    """One row of logits.

    Attributes:
        row: the sequence's row.
        position: of the token to be sampled.
        num_prompt_tokens: the first tokens of `history`.
        history: int32 [position], all tokens before it, a draft's path included. A view: valid
            during the call, and read-only.
    """

    row: int
    position: int
    num_prompt_tokens: int
    history: NDArray[np.int32]


class LogitsProcessor(ABC):
    """Changes logits. Its state is recomputable from a row's history and parameters: what it did before,
    for drafts too, leaves no trace.

    One for which that does not hold says so by the promise `keeps_state`. It is then called exactly once
    for each token of a row, in order and with no other row: requests that use it run without drafts,
    which the log says once and a metric counts, and they are not preempted.
    """

    @abstractmethod
    def admit(self, row: int, params: Mapping[str, Any]) -> None:
        """A sequence with these validated parameters took the row. If it raises, the request ends
        with an error."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> None:
        """Changes logits, float32 [len(rows), vocab_size], in place.

        Only rows that were admitted to this processor are passed. If it raises, or leaves logits of
        another shape or dtype, it is called once more for each row alone, with the logits as they
        were; one that `keeps_state` is not. The requests of rows on which it fails then end with an
        error: leaving it out would change tokens. Only a draft's row on which it fails is just not used: a
        wrong guess ends no request.

        A row in which it leaves a NaN, or nothing but -inf, ends its request in the same way.
        """

    @abstractmethod
    def release(self, row: int) -> None:
        """The row is given back. What it raises is logged."""
