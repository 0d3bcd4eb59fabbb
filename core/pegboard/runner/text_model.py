"""A unit that runs one text at a time, for commands that look at logits and hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pegboard.errors import EngineError, RequestError
from pegboard.interfaces.attention import AttentionBatch
from pegboard.runner.model_unit import ModelUnit, UnitParts
from pegboard.runner.parts import use_threads


class TextModel:
    """Each text is computed anew, in blocks 1, 2, 3 and so on. See `interfaces.command.LoadedModel`."""

    def __init__(self, parts: UnitParts, num_threads: int) -> None:
        """Loads the weights."""
        use_threads(num_threads)
        self._parts = parts
        self._unit: ModelUnit | None = ModelUnit(parts)
        self._max_tokens = max_text(parts)

    @torch.inference_mode()
    def forward(
        self, token_ids: Sequence[int], taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """float32 logits [num_tokens, vocab_size], and hidden states [num_tokens, hidden_size].

        Raises:
            RequestError: the text is empty or too long, or the model has no such layer.
        """
        unit, num_tokens = self._unit, len(token_ids)
        if unit is None:
            raise EngineError("the model was closed")
        if not 0 < num_tokens <= self._max_tokens:
            raise RequestError("text", f"{num_tokens} tokens", allowed=f"1 to {self._max_tokens}")
        allowed = self._parts.shape.taps
        if unknown := [tap for tap in taps if tap not in allowed]:
            raise RequestError("taps", str(unknown), allowed=f"-1 to {allowed[-1]}")
        ids = torch.tensor(list(token_ids), device=unit.device)
        hidden, tapped = unit.forward(ids, text_batch(self._parts, num_tokens), taps)
        return unit.model.logits(hidden), tapped

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        self._parts.source.close()
        self._unit = None


def max_text(parts: UnitParts) -> int:
    """Tokens of the longest text that a unit holds."""
    room = [
        (num_blocks - 1) * group.block_size
        for num_blocks, group in zip(parts.num_blocks, parts.groups, strict=True)
    ]
    return min(parts.max_positions, *room)


def text_batch(parts: UnitParts, num_tokens: int) -> AttentionBatch:
    """One row, from its first token on."""
    device = torch.device(parts.device)
    return AttentionBatch(
        positions=torch.arange(num_tokens, device=device),
        query_starts=torch.tensor([0, num_tokens]),
        num_computed=torch.tensor([0]),
        block_tables=tuple(
            torch.arange(1, 1 + num_blocks, dtype=torch.int32, device=device)[None]
            for num_blocks in (math.ceil(num_tokens / group.block_size) for group in parts.groups)
        ),
    )
