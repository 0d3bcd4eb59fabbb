"""The built-in logits processors: penalties, logit bias, a least length.

They depend on a row's history and parameters alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.builtin.processor_params import LogitBiasParams, MinTokensParams, PenaltiesParams
from pegboard.interfaces.logits_processor import LogitRow, LogitsProcessor, ProcessorContext

T = TypeVar("T")


class _OfRows(LogitsProcessor, Generic[T]):
    """A processor that keeps one value for each row, from `admit` to `release`."""

    def __init__(self, context: ProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._device = torch.device(context.device)
        self._values: dict[int, T] = {}

    def release(self, row: int) -> None:
        self._values.pop(row, None)


class Penalties(_OfRows[PenaltiesParams]):
    """Lowers the logits of tokens that were seen.

    Repetition acts on prompt and output: a positive logit is divided by the penalty, a negative one
    multiplied. Presence and frequency are then subtracted for tokens of the output.
    """

    def admit(self, row: int, params: Mapping[str, Any]) -> None:
        self._values[row] = PenaltiesParams(**params)

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> None:
        for i, row in enumerate(rows):
            params = self._values[row.row]
            if params.repetition_penalty != 1.0:
                ids = self._tensor(np.unique(row.history))
                seen = logits[i, ids]
                penalty = params.repetition_penalty
                logits[i, ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
            if params.presence_penalty or params.frequency_penalty:
                generated, counts = np.unique(
                    row.history[row.num_prompt_tokens :], return_counts=True
                )
                cost = params.presence_penalty + params.frequency_penalty * self._tensor(counts)
                logits[i, self._tensor(generated)] -= cost

    def _tensor(self, values: NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)


class LogitBias(_OfRows[tuple[torch.Tensor, torch.Tensor]]):
    """Adds a number to the logits of chosen tokens."""

    def admit(self, row: int, params: Mapping[str, Any]) -> None:
        bias = LogitBiasParams(**params).logit_bias
        if bias and max(bias) >= self._vocab_size:
            raise ValueError(f"token id {max(bias)} is outside a vocabulary of {self._vocab_size}")
        self._values[row] = (
            torch.tensor(list(bias), dtype=torch.int64, device=self._device),
            torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device),
        )

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> None:
        for i, row in enumerate(rows):
            ids, values = self._values[row.row]
            logits[i, ids] += values


class MinTokens(_OfRows[tuple[int, torch.Tensor]]):
    """Bans the tokens that would end a sequence until it has a number of tokens."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self._eos_token_ids = context.eos_token_ids

    def admit(self, row: int, params: Mapping[str, Any]) -> None:
        values = MinTokensParams(**params)
        eos_ids = () if values.ignore_eos else self._eos_token_ids
        ids = sorted(i for i in {*eos_ids, *values.stop_token_ids} if i < self._vocab_size)
        if len(ids) == self._vocab_size:
            raise ValueError("every token would end the sequence")
        tensor = torch.tensor(ids, dtype=torch.int64, device=self._device)
        self._values[row] = (values.min_tokens, tensor)

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> None:
        for i, row in enumerate(rows):
            min_tokens, ids = self._values[row.row]
            if row.position - row.num_prompt_tokens < min_tokens:
                logits[i, ids] = float("-inf")
