"""The options of the drafter `eagle`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EagleOptions(BaseModel):
    """`drafter.options`.

    Attributes:
        top_k: children of a node, and nodes of a depth that have children (EAGLE-2); 1: chains.
        depth: the deepest node of a tree. Chains end at `num_speculative_tokens`.
        taps: the target's layers whose inputs the head of EAGLE-3 reads, in the order of its `fc`;
            `auto`: what its config says, or else 2, L // 2 and L - 3 of L layers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    top_k: int = Field(default=1, ge=1, le=64)
    depth: int = Field(default=5, ge=1, le=64)
    taps: Literal["auto"] | tuple[int, ...] = "auto"
