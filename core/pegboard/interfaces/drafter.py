"""`Drafter`: which tokens to guess."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.step import Drafts, Float32, Int32, RowAdmission

if TYPE_CHECKING:
    import torch

VERSION = 0

MAX_CALL_S = 5.0
"""Longest that one call may take. A drafter that takes longer is cut off, as one that raises."""


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter's factory gets.

    Attributes:
        num_speculative_tokens: most nodes a row.
        vocab_size: of the target.
        max_num_seqs: rows.
        max_model_len: most tokens a row.
        model: reference of the drafter's own model, as the config gives it.
        dtype: activation dtype of the target.
        device: `cpu` or `cuda`.
        num_threads: threads it may use on a CPU.
    """

    num_speculative_tokens: int
    vocab_size: int
    max_num_seqs: int
    max_model_len: int
    model: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class Observation:
    """What one execute brought, for every row that computed, prefill chunks included. Its arrays
    are read-only.

    Attributes:
        rows: int32 [R].
        offsets: int32 [R + 1]; entries of a row in the arrays below.
        token_ids: int32 [N], tokens whose hidden states were computed and kept: prompt chunks and
            accepted nodes.
        positions: int32 [N].
        taps: decoder layer to its input hidden states [N, hidden_size].
        next_offsets, next_token_ids: int32 [R + 1], [T], tokens committed in this execute.
        propose: int32 [R], most nodes to propose for each row.
    """

    rows: Int32
    offsets: Int32
    token_ids: Int32
    positions: Int32
    taps: dict[int, torch.Tensor]
    next_offsets: Int32
    next_token_ids: Int32
    propose: Int32


class Drafter(ABC):
    """Guesses ahead, on the worker. It keeps no state that a rejected token could spoil.

    Requests do not depend on it. When a method raises, takes longer than `MAX_CALL_S`, or proposes what
    cannot be used, the drafter is cut off, and no method is called. After a pause, `release` is called
    for the rows that it had, whether or not their sequences still run, and it begins anew with those
    that are admitted from then on; other rows are not shown to it.
    """

    taps: tuple[int, ...] = ()
    """Decoder layers whose input hidden states it wants, -1 for the embedding's output. Read once, before
    weights load: others than the model's are refused."""

    @abstractmethod
    def admit(self, admission: RowAdmission) -> None:
        """A sequence took a row: its known tokens, and the seed and parameters that a drafter which
        samples shares its noise by. Tokens that a cache served bring no taps."""

    @abstractmethod
    def release(self, row: int, num_tokens: int) -> None:
        """The row is given back; only its first `num_tokens` tokens ever were."""

    @abstractmethod
    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        """Draft nodes for the next step, and the drafter's probability of each node.

        Nodes are proposed for rows in `seen`, each row once, at most `seen.propose` of them; tokens are
        the target's; probabilities are from 0 to 1. Where the attention backend has no `query_mask`, of a
        tree only the path of first children is kept."""
