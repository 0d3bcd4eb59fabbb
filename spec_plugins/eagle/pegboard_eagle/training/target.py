"""What a head takes from its target: sizes, taps, embedding and head, whatever they are stored as."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pegboard.errors import ConfigError
from pegboard.interfaces.drafter import DrafterContext
from pegboard.interfaces.model import ModelShape
from pegboard_eagle.training.head import HeadShape

MAX_HEAD_DIM = 128
PIECE = 4096
"""Rows that are read at once."""


@dataclass(frozen=True, slots=True)
class Target:
    """A target's matrices.

    Attributes:
        shape: of the target.
        embedding: float32 [vocab_size, hidden_size].
        rows: float32 [vocab_size, hidden_size], of its head.
    """

    shape: ModelShape
    embedding: torch.Tensor
    rows: torch.Tensor


def taps_of(shape: ModelShape) -> tuple[int, ...]:
    """The layers whose inputs the head reads, by the paper's rule.

    Raises:
        ConfigError: the model has too few.
    """
    taps = (2, shape.num_layers // 2, shape.num_layers - 3)
    if any(tap not in shape.taps for tap in taps):
        raise ConfigError(
            "model", f"{shape.num_layers} decoder layers", allowed="2 or more, for three taps"
        )
    return taps


def head_shape(target: ModelShape, vocab_size: int, intermediate_size: int | None) -> HeadShape:
    """Sizes of a target's head. Its attention has as many heads for keys as for queries, so that the
    closed-form start fits into it.

    Args:
        vocab_size: tokens that it draws.
        intermediate_size: of its MLP; None: the target's.
    """
    hidden = target.hidden_size
    sizes = (target.attention[0].head_dim, *range(MAX_HEAD_DIM, 0, -1))
    head_dim = next((size for size in sizes if size % 2 == 0 and hidden % size == 0), None)
    if head_dim is None:
        raise ConfigError("model", f"hidden size {hidden}", allowed="an even one")
    return HeadShape(
        hidden_size=hidden,
        num_taps=3,
        num_heads=hidden // head_dim,
        head_dim=head_dim,
        intermediate_size=intermediate_size or target.intermediate_size,
        vocab_size=vocab_size,
        theta=target.rope.theta,
        eps=target.norm_eps,
    )


@torch.no_grad()
def read_target(context: DrafterContext) -> Target:
    """The matrices of a target whose weights are loaded."""
    shape = context.target_shape
    assert shape is not None
    ids = torch.arange(shape.vocab_size, device=context.device)
    embedding = [context.embed(piece).float().cpu() for piece in torch.split(ids, PIECE)]
    directions = torch.eye(
        shape.hidden_size, dtype=getattr(torch, context.dtype), device=context.device
    )
    rows = [context.logits(piece).float().cpu() for piece in torch.split(directions, 64)]
    return Target(shape, torch.cat(embedding), torch.cat(rows).T.contiguous())
