"""How well a model predicts a text, and how far its predictions are from another's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

    from pegboard.eval.windows import Window
    from pegboard.interfaces.command import LoadedModel

_ROWS = 128
"""Logit rows worked on at once: probabilities of a whole window would be several times its logits."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """How A's predictions differ from B's, at the scored tokens.

    Attributes:
        perplexity_ratio: A's perplexity over B's.
        perplexity_ratio_error: its standard error, from the differences token by token.
        kl_mean, kl_median, kl_p99, kl_max: Kullback-Leibler divergence from B's distribution to A's,
            sum of p_B (log p_B - log p_A), in nats.
        top1_agreement: share of tokens at which the most likely token is the same.
        layer_errors: at the input of each decoder layer, the mean over tokens of |A's hidden state -
            B's| / |B's|; the last is that of the logits. Empty where the models' sizes differ.
    """

    perplexity_ratio: float
    perplexity_ratio_error: float
    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    layer_errors: tuple[float, ...]


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """The models' quality on a text.

    Attributes:
        num_tokens: that were scored.
        perplexity_a: of A.
        perplexity_b: of B, if there is one.
        divergence: of A from B.
    """

    num_tokens: int
    perplexity_a: float
    perplexity_b: float | None = None
    divergence: Divergence | None = None


def score(model: LoadedModel, windows: Iterable[Window]) -> Quality:
    """The perplexity of one model."""
    losses: list[torch.Tensor] = []
    for window in windows:
        logits, _ = model.forward(window.token_ids)
        for rows, targets in _scored(window, logits):
            losses.append(_losses(rows.log_softmax(-1), targets))
    joined = _joined(losses)
    return Quality(num_tokens=len(joined), perplexity_a=_perplexity(joined))


def compare(
    a: LoadedModel, b: LoadedModel, windows: Iterable[Window], taps: Sequence[int]
) -> Quality:
    """Both models on the same windows.

    Args:
        a: the model under test.
        b: the model that it is compared with.
        windows: the text.
        taps: decoder layers whose inputs are compared.
    """
    tokens, layers = _Tokens(), _Layers(taps)
    for window in windows:
        logits_a, tapped_a = a.forward(window.token_ids, taps)
        logits_b, tapped_b = b.forward(window.token_ids, taps)
        layers.add(tapped_a, tapped_b)
        pairs = zip(_scored(window, logits_a), _scored(window, logits_b), strict=True)
        for (rows_a, targets), (rows_b, _) in pairs:
            tokens.add(rows_a, rows_b, targets)
    return tokens.quality(layers.errors())


class _Tokens:
    """Columns over the scored tokens: both losses, divergence, agreement, error of the logits."""

    def __init__(self) -> None:
        self._columns: list[list[torch.Tensor]] = [[] for _ in range(5)]

    def add(self, rows_a: torch.Tensor, rows_b: torch.Tensor, targets: torch.Tensor) -> None:
        """float32 logits [num_tokens, vocab_size] of both; targets int64 [num_tokens]."""
        log_a, log_b = rows_a.log_softmax(-1), rows_b.log_softmax(-1)
        # Rounding may leave a sum of nearly nothing below 0.
        divergence = (log_b.exp() * (log_b - log_a)).sum(-1).clamp(min=0)
        found = (
            _losses(log_a, targets),
            _losses(log_b, targets),
            divergence,
            rows_a.argmax(-1) == rows_b.argmax(-1),
            _relative_error(rows_a, rows_b),
        )
        for column, values in zip(self._columns, found, strict=True):
            column.append(values.double())

    def quality(self, layer_errors: Sequence[float]) -> Quality:
        """The figures of all tokens; `layer_errors` without that of the logits."""
        losses_a, losses_b, divergence, agrees, logit_errors = map(_joined, self._columns)
        ratio, error = _ratio(losses_a, losses_b)
        errors = (*layer_errors, logit_errors.mean().item()) if layer_errors else ()
        return Quality(
            num_tokens=len(losses_a),
            perplexity_a=_perplexity(losses_a),
            perplexity_b=_perplexity(losses_b),
            divergence=Divergence(
                perplexity_ratio=ratio,
                perplexity_ratio_error=error,
                kl_mean=divergence.mean().item(),
                kl_median=divergence.quantile(0.5).item(),
                kl_p99=divergence.quantile(0.99).item(),
                kl_max=divergence.max().item(),
                top1_agreement=agrees.mean().item(),
                layer_errors=errors,
            ),
        )


class _Layers:
    """Relative errors of hidden states, summed over tokens."""

    def __init__(self, taps: Sequence[int]) -> None:
        self._sums = dict.fromkeys(taps, 0.0)
        self._num_tokens = 0

    def add(self, a: dict[int, torch.Tensor], b: dict[int, torch.Tensor]) -> None:
        """Hidden states [num_tokens, hidden_size] by layer."""
        for layer in self._sums:
            self._sums[layer] += _relative_error(a[layer], b[layer]).sum().item()
        if self._sums:
            self._num_tokens += len(next(iter(a.values())))

    def errors(self) -> list[float]:
        """The mean of each layer."""
        return [total / self._num_tokens for total in self._sums.values()]


def _scored(window: Window, logits: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of the tokens before those that are scored, and these, some rows at a time."""
    import torch

    rows = logits[window.first_scored - 1 : -1]
    targets = torch.tensor(window.token_ids[window.first_scored :], device=logits.device)
    return zip(torch.split(rows, _ROWS), torch.split(targets, _ROWS), strict=True)


def _losses(log_probabilities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log p of each target, float64."""
    return -log_probabilities.gather(1, targets[:, None])[:, 0].double()


def _relative_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b| / |b| of each row, float64; 0 where the rows are equal."""
    a, b = a.double(), b.double()
    difference = (a - b).norm(dim=-1)
    error: torch.Tensor = (difference / b.norm(dim=-1)).masked_fill(difference == 0, 0.0)
    return error


def _ratio(losses_a: torch.Tensor, losses_b: torch.Tensor) -> tuple[float, float]:
    """The ratio of the perplexities, and its standard error to first order."""
    difference = losses_a - losses_b
    ratio = difference.mean().exp().item()
    error = difference.std().item() / len(difference) ** 0.5 if len(difference) > 1 else 0.0
    return ratio, ratio * error


def _perplexity(losses: torch.Tensor) -> float:
    return losses.mean().exp().item()


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat(tuple(parts))
