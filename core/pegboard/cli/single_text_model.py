"""A model that runs one text at a time, for commands that look at logits and hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.errors import EngineError, RequestError

if TYPE_CHECKING:
    import torch

    from pegboard.compose import Prepared
    from pegboard.interfaces.attention import AttentionBatch
    from pegboard.interfaces.kv import KVGroup
    from pegboard.runner.loading import Loaded


class SingleTextModel:
    """The engine's own layers and kernels. Each text is computed anew, in blocks 1, 2, 3 and so on.

    Args:
        prepared: a composition of one sequence at a time.
    """

    def __init__(self, prepared: Prepared) -> None:
        from pegboard.compose import Maker, worker_parts
        from pegboard.plugins.loader import load_plugins
        from pegboard.runner.loading import load

        composition = prepared.composition
        maker = Maker(load_plugins(composition.manifests), {})
        parts = worker_parts(composition, maker, lambda name: None)
        self._source = parts.source
        self._taps = parts.shape.taps
        self._loaded: Loaded | None = load(parts)
        blocks = zip(composition.num_blocks, composition.groups, strict=True)
        room = [(num_blocks - 1) * group.block_size for num_blocks, group in blocks]
        self._max_tokens = min(composition.max_model_len, *room)

    def forward(
        self, token_ids: Sequence[int], taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """float32 logits [num_tokens, vocab_size], and hidden states [num_tokens, hidden_size].

        Raises:
            RequestError: the text is empty or too long, or the model has no such layer.
        """
        import torch

        on, num_tokens = self._loaded, len(token_ids)
        if on is None:
            raise EngineError("the model was closed")
        if not 0 < num_tokens <= self._max_tokens:
            raise RequestError("text", f"{num_tokens} tokens", allowed=f"1 to {self._max_tokens}")
        unknown = [tap for tap in taps if tap not in self._taps]
        if unknown:
            raise RequestError("taps", str(unknown), allowed=f"-1 to {self._taps[-1]}")
        batch = text_batch(num_tokens, on.groups, on.device)
        with torch.inference_mode():
            on.attention.prepare(batch)
            ids = torch.tensor(list(token_ids), device=on.device)
            hidden, tapped = on.model.forward(ids, batch.positions, taps)
            return on.model.logits(hidden), tapped

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        self._source.close()
        self._loaded = None


def text_batch(num_tokens: int, groups: Sequence[KVGroup], device: torch.device) -> AttentionBatch:
    """One row, from its first token on."""
    import torch

    from pegboard.interfaces.attention import AttentionBatch

    num_blocks = [math.ceil(num_tokens / group.block_size) for group in groups]
    return AttentionBatch(
        positions=torch.arange(num_tokens, device=device),
        query_starts=torch.tensor([0, num_tokens]),
        num_computed=torch.tensor([0]),
        block_tables=tuple(
            torch.arange(1, 1 + count, dtype=torch.int32, device=device)[None]
            for count in num_blocks
        ),
    )
