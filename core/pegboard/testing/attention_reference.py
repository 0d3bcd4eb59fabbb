"""Dense attention in float64: the formula, with every key and value in the open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pegboard.interfaces.kernel import RotaryKernel
from pegboard.interfaces.model import AttentionShape

if TYPE_CHECKING:
    import torch


def rotate_reference(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Rotates pairs (i, i + n) of each head as complex numbers, in float64 or complex128."""
    import torch

    n = cos.shape[1]
    turns = torch.complex(cos[positions].double(), sin[positions].double())[:, None, :]
    pairs = torch.complex(x[..., :n].double(), x[..., n : 2 * n].double()) * turns
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * n :].double()], dim=-1)


class ReferenceRotary(RotaryKernel):
    """The `rotary` kernel that backends under test are given."""

    def self_test(self) -> None: ...

    def rotate(
        self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return rotate_reference(x, positions, cos, sin).to(x.dtype)


@dataclass(slots=True)
class DenseAttention:
    """One row of one layer: all its keys and values in the open, attention by the formula."""

    shape: AttentionShape
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def attend(
        self, q: torch.Tensor, position: int, visible: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_heads, head_dim] and the log of the sum of exponentials [num_heads] of one token.

        Args:
            q: [num_heads, head_dim], rotated.
            position: of the token.
            visible: entries of `keys` that it may see, before the window.
        """
        import torch

        window = self.shape.window or math.inf
        seen = [i for i in visible if position - self.positions[i] < window]
        group_size = self.shape.num_heads // self.shape.num_kv_heads
        keys = torch.stack([self.keys[i] for i in seen]).repeat_interleave(group_size, dim=1)
        values = torch.stack([self.values[i] for i in seen]).repeat_interleave(group_size, dim=1)
        scores = torch.einsum("hd,thd->ht", q.double(), keys.double()) * self.shape.scale
        if self.shape.soft_cap is not None:
            scores = self.shape.soft_cap * torch.tanh(scores / self.shape.soft_cap)
        weights = torch.softmax(scores, dim=-1)
        return torch.einsum("ht,thd->hd", weights, values.double()), scores.logsumexp(-1)
