"""The head as torch trains it: EAGLE-3 with one decoder layer, unrolled as it drafts.

Column t of a text pairs the feature of token t with token t + 1, and guesses token t + 2; at step i of
the unrolled head it pairs its own state with token t + 1 + i. A step sees the first step's keys up to its
column and, of the steps after it, those of its own column (arXiv 2503.01840, training-time test).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional

from pegboard_eagle.training.columns import Columns


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head.

    Attributes:
        hidden_size: of the target, and of the head.
        num_taps: hidden states that make a feature.
        num_heads: of attention, with as many for keys.
        head_dim: elements a head; `num_heads * head_dim` is the hidden size.
        intermediate_size: of the MLP.
        vocab_size: tokens that it guesses.
        theta: rotary base.
        eps: of its norms.
    """

    hidden_size: int
    num_taps: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    theta: float
    eps: float

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


class Head(nn.Module):
    """Parameters by the names of SafeAILab's checkpoints; `tap_scale` becomes part of `fc` there."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden_size
        self.tap_scale = nn.Buffer(torch.ones(shape.num_taps * hidden))
        self.fc = nn.Linear(shape.num_taps * hidden, hidden, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = _Norm(hidden, eps=shape.eps)
        self.lm_head = nn.Linear(hidden, shape.vocab_size, bias=False)

    def forward(self, columns: Columns, num_steps: int) -> list[torch.Tensor]:
        """States of each step before the last norm, float [B, C, hidden_size]."""
        layer = self.midlayer
        rows = columns.at[:, :, None]
        features = self.features(columns.taps)
        joined = layer.joined(columns.embedded, features)
        positions = torch.arange(columns.taps.shape[1])
        keys, values = layer.keys(joined, positions), layer.values(joined)
        seen = positions[None, None, :] <= rows
        state = features.take_along_dim(rows, 1)
        joined = joined.take_along_dim(rows, 1)
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        states = []
        for step in range(num_steps):
            if step:
                joined = layer.joined(_shifted(columns.answers, step), state)
                at = columns.at + step
                own.append((layer.keys(joined, at), layer.values(joined)))
            queries = layer.queries(joined, columns.at + step)
            state = layer.mixed(state, _attended(queries, keys, values, seen, own))
            states.append(state)
        return states

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """Features of the target's states, [..., num_taps * hidden_size] -> [..., hidden_size]."""
        features: torch.Tensor = self.fc(taps * self.tap_scale)
        return features

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> [..., vocab_size]."""
        scores: torch.Tensor = self.lm_head(self.norm(states))
        return scores


def widened(x: torch.Tensor) -> torch.Tensor:
    """As float32, where it is narrower."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Layer(nn.Module):
    """The decoder layer, whose attention reads [embedding, feature]."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden_size
        self.hidden_norm = _Norm(hidden, eps=shape.eps)
        self.input_layernorm = _Norm(hidden, eps=shape.eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _Norm(hidden, eps=shape.eps)
        self.mlp = _MLP(hidden, shape.intermediate_size)

    def joined(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), dim=-1)

    def queries(self, joined: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._rotated(self.self_attn.q_proj(joined), positions)

    def keys(self, joined: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._rotated(self.self_attn.k_proj(joined), positions)

    def values(self, joined: torch.Tensor) -> torch.Tensor:
        return self._by_head(self.self_attn.v_proj(joined))

    def mixed(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = residual + self.self_attn.o_proj(attended)
        output: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, hidden_size] -> [B, num_heads, N, head_dim]."""
        return x.view(*x.shape[:2], self.shape.num_heads, self.shape.head_dim).transpose(1, 2)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding, halves first, of positions [N] or [B, N]."""
        x, half = widened(self._by_head(x)), self.shape.head_dim // 2
        rates = self.shape.theta ** -(torch.arange(half) / half)
        angles = positions[..., None] * rates
        angles = angles if positions.dim() == 1 else angles[:, None]
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class _Norm(nn.RMSNorm):
    """Norms in float32, whatever products are of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(widened(x))


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.q_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.k_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.v_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)


class _MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


def _shifted(x: torch.Tensor, steps: int) -> torch.Tensor:
    """[B, C, size] with column c + steps at c; zeros behind the last."""
    return functional.pad(x[:, steps:], (0, 0, 0, min(steps, x.shape[1])))


def _attended(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    own: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """[B, C, hidden_size]: attention to the first step's keys that a column has seen, and to those of its
    later steps."""
    queries = queries * float(queries.shape[-1]) ** -0.5
    scores = widened(torch.matmul(queries, keys.transpose(2, 3)))
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    beside = [(queries * key).sum(-1, keepdim=True) for key, _ in own]
    weights = torch.cat((scores, *beside), dim=-1).softmax(dim=-1)
    num_keys = keys.shape[2]
    output = torch.matmul(weights[..., :num_keys], values)
    for step, (_, value) in enumerate(own):
        output = output + weights[..., num_keys + step, None] * value
    return output.transpose(1, 2).flatten(2)
