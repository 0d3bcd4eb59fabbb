"""The closed-form start: a head that guesses from its first step on, by ridge regressions.

A column's state is to be the target's feature of the next token, which the target's own head reads. `fc` is
the regression of a token's feature on its taps. What the next token adds to it is that of the difference
on [embedding, feature]: attention on the column itself takes it through `v_proj`, and the rest of the layer
passes its input on. Copying the target's last layer instead would guess the token that is known already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pegboard_eagle.training.answers import Answer
from pegboard_eagle.training.head import Head

RIDGE = 1e-3
"""Penalty of weights, where inputs have a variance of 1."""


class Regression:
    """Ridge regression without intercept, on sums that grow text by text."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self._squares = torch.zeros(inputs, inputs, dtype=torch.float64)
        self._products = torch.zeros(inputs, outputs, dtype=torch.float64)
        self._count = 0

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Rows of inputs and of outputs."""
        self._squares += x.T @ x
        self._products += x.T @ y
        self._count += len(x)

    @property
    def scale(self) -> torch.Tensor:
        """float64 [inputs], root mean squares."""
        return (self._squares.diagonal() / max(self._count, 1)).sqrt().clamp_min(1e-6)

    def weights(self) -> torch.Tensor:
        """float32 [outputs, inputs], of inputs divided by `scale`."""
        scale = self.scale
        squares = self._squares / scale / scale[:, None]
        squares.diagonal().add_(RIDGE * max(self._count, 1))
        factor = torch.linalg.cholesky(squares)
        products = self._products / scale[:, None]
        return torch.cholesky_solve(products, factor).T.float().contiguous()


class Start:
    """Makes a head of the answers that it is shown, twice: for each of its regressions once.

    Args:
        head: whose parameters are set.
        embedding: float32 [target's vocabulary, hidden_size].
        rows: float32 [draft vocabulary, hidden_size], of the target's own head.
    """

    def __init__(self, head: Head, embedding: torch.Tensor, rows: torch.Tensor) -> None:
        hidden, num_taps = head.shape.hidden_size, head.shape.num_taps
        self._head = head
        self._embedding = embedding
        self._rows = rows
        self._of_taps = Regression(num_taps * hidden, hidden)
        self._of_tokens = Regression(2 * hidden, hidden)
        self._root_sum, self._count = 0.0, 0

    def show(self, answers: Sequence[Answer]) -> None:
        """Answers, for the first regression."""
        # The first token's states are like no others.
        features = torch.cat([one.features[1:] for one in answers]).float()
        self._of_taps.add(torch.cat([one.taps[1:] for one in answers]).float(), features)
        self._root_sum += float(features.square().mean(1).sqrt().sum())
        self._count += len(features)

    @torch.no_grad()
    def fit_taps(self) -> None:
        """Ends the first regression."""
        self._head.fc.weight.copy_(self._of_taps.weights())
        self._head.tap_scale.copy_(1 / self._of_taps.scale)

    @torch.no_grad()
    def show_again(self, answers: Sequence[Answer]) -> None:
        """Answers, for the second regression."""
        eps = self._head.shape.eps
        known = self._head.features(torch.cat([one.taps[1:-1] for one in answers]).float())
        token_ids = torch.cat([one.token_ids[2:-1] for one in answers]).long()
        joined = torch.cat((_normed(self._embedding[token_ids], eps), _normed(known, eps)), dim=1)
        features = torch.cat([one.features[2:] for one in answers]).float()
        self._of_tokens.add(joined, features - known)

    @torch.no_grad()
    def fit(self) -> None:
        """Ends the second regression, and sets the rest."""
        head, attention = self._head, self._head.midlayer.self_attn
        hidden = head.shape.hidden_size
        weights = self._of_tokens.weights() / self._of_tokens.scale.float()
        attention.v_proj.weight.copy_(weights)
        attention.o_proj.weight.copy_(torch.eye(hidden))
        itself = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
        attention.q_proj.weight.copy_(itself)
        attention.k_proj.weight.copy_(itself)
        head.midlayer.mlp.down_proj.weight.zero_()
        head.norm.weight.fill_(self._root_sum / max(self._count, 1))
        head.lm_head.weight.copy_(self._rows)


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps)
