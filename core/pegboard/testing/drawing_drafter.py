"""A drafter that draws its guesses at random, from what the last token says of the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pegboard.interfaces.drafter import DrafterContext, Observation, SampledDrafter
from pegboard.step import Drafts, Float32, Int32, RowAdmission

if TYPE_CHECKING:
    import torch


class DrawingDrafter(SampledDrafter):
    """Chains as long as asked for. A draw depends on the request's seed, the sequence and the position
    alone.

    Args:
        context: says how many tokens there are.
        seed: of the distributions.
        spread: how far their logits are apart; 0: all tokens are equally likely.
    """

    manifest: ClassVar[Any] = {"promises": ["probabilities"]}

    def __init__(self, context: DrafterContext, seed: int = 0, spread: float = 1.0) -> None:
        size = (context.vocab_size, context.vocab_size)
        weights = np.exp(spread * np.random.default_rng(seed).standard_normal(size))
        self._next: Float32 = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
        self._device = context.device
        self._rows: dict[int, RowAdmission] = {}
        self._num_known: dict[int, int] = {}

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self._rows[admission.row] = admission
        self._num_known[admission.row] = len(admission.token_ids)

    def release(self, row: int, num_tokens: int) -> None:
        del self._rows[row]

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        drafts, drawn_from = self._draw(seen)
        return drafts, drawn_from[np.arange(len(drawn_from)), drafts.token_ids]

    def propose_sampled(self, seen: Observation) -> tuple[Drafts, torch.Tensor]:
        import torch

        drafts, drawn_from = self._draw(seen)
        return drafts, torch.from_numpy(drawn_from).to(self._device)

    def _draw(self, seen: Observation) -> tuple[Drafts, Float32]:
        """The nodes, and of each what its token was drawn from."""
        tokens: list[int] = []
        drawn_from = [self._next[:0]]
        for i, row in enumerate(seen.rows.tolist()):
            self._num_known[row] += int(seen.next_offsets[i + 1] - seen.next_offsets[i])
            if not seen.propose[i]:
                continue
            last = int(seen.next_token_ids[seen.next_offsets[i + 1] - 1])
            admission = self._rows[row]
            for at in range(int(seen.propose[i])):
                key = (admission.seed, admission.index, self._num_known[row] + at)
                reached = self._next[last].cumsum(dtype=np.float64)
                u = np.random.default_rng(key).random() * reached[-1]
                drawn_from.append(self._next[last : last + 1])
                last = int(np.searchsorted(reached, u, side="right"))
                tokens.append(last)
        counts = seen.propose.tolist()
        drafts = Drafts(
            rows=seen.rows.copy(),
            offsets=np.array([0, *np.cumsum(counts)], np.int32),
            token_ids=np.array(tokens, np.int32),
            parents=np.array([n - 1 for count in counts for n in range(count)], np.int32),
        )
        return drafts, np.concatenate(drawn_from)
