"""What a head's guesses are held to: the target's probabilities, of the tokens that the head draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from pegboard_eagle.training.columns import NOT_DRAWN, Columns
from pegboard_eagle.training.head import Head, widened


@dataclass(frozen=True, slots=True)
class LossOptions:
    """What is minimized: of each step of the unrolled head the cross entropy with the target's
    probabilities, and some of the distance of its states from the target's features.

    Attributes:
        num_steps: of the unrolled head.
        decay: weight of a step, of that of the step before.
        feature_weight: of the mean square distance, where features have a mean square of 1.
    """

    num_steps: int
    decay: float
    feature_weight: float


class _CrossEntropy(torch.autograd.Function):
    """Mean cross entropy of rows with soft targets. Its gradient is made with it, so that neither rows nor
    targets are kept."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = widened(logits)
        whole = torch.logsumexp(rows, dim=1, keepdim=True)
        loss = (whole.squeeze(1) - (rows * targets).sum(1)).mean()
        gradient = (rows - whole).exp_().sub_(targets).div_(len(rows))
        ctx.save_for_backward(gradient.to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None


def loss_of(head: Head, columns: Columns, rows: torch.Tensor, options: LossOptions) -> torch.Tensor:
    """The loss of a batch.

    Args:
        rows: [draft vocabulary, hidden_size], of the target's own head.
    """
    states = head(columns, options.num_steps)
    width = columns.at.shape[1]
    at = columns.within(0).flatten().nonzero().squeeze(1)
    number = torch.zeros(columns.at.numel(), dtype=torch.int64)
    number[at] = torch.arange(len(at))
    with torch.no_grad():
        features = columns.features.flatten(0, 1)[at]
        targets = widened(functional.linear(features, rows)).softmax(dim=1)
        scale = columns.features.square().mean(2).flatten()[at].mean()
    drawn = columns.guesses != NOT_DRAWN
    total = columns.taps.new_zeros(())
    for step, state in enumerate(states):
        valid = columns.within(step)
        valid[:, : width - step] &= drawn[:, step:]
        here = valid.flatten().nonzero().squeeze(1)
        if not len(here):
            break
        chosen, wanted = state.flatten(0, 1)[here], number[here + step]
        loss: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            head.logits(chosen), targets[wanted]
        )
        distance = (widened(chosen) - features[wanted]).square().mean() / scale
        total = total + options.decay**step * (loss + options.feature_weight * distance)
    return total


@torch.no_grad()
def hits_of(head: Head, columns: Columns, num_steps: int) -> list[tuple[int, int]]:
    """For each step of a chain of guesses: columns whose text goes so far, and those of them that are
    right up to there."""
    right = torch.ones_like(columns.at, dtype=torch.bool)
    counts = []
    for step, state in enumerate(head(columns, num_steps)):
        valid = columns.within(step)
        wanted = torch.full_like(columns.at, NOT_DRAWN)
        wanted[:, : wanted.shape[1] - step] = columns.guesses[:, step:]
        right &= head.logits(state).argmax(dim=2) == wanted
        counts.append((int(valid.sum()), int((valid & right).sum())))
    return counts
