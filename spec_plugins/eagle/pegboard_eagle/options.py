"""The options of the drafter `eagle`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EagleOptions(BaseModel):
    """`drafter.options`.

    Attributes:
        top_k: children of a node, and nodes of a depth that have children (EAGLE-2); 1: chains.
        depth: the deepest node of a tree. Chains end at `num_speculative_tokens`.
        min_confidence: nodes whose path the head holds for less probable are not proposed.
        sampled: of rows that are sampled, draw a chain's tokens at the row's temperature, with the noise
            of the target's own; else the likeliest are taken.
        quantizer: how the head's weights are kept, a quantizer by name.
        taps: the target's layers whose inputs the head of EAGLE-3 reads, in the order of its `fc`;
            `auto`: what its config says, or else 2, L // 2 and L - 3 of L layers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    top_k: int = Field(default=1, ge=1, le=64)
    depth: int = Field(default=5, ge=1, le=64)
    min_confidence: float = Field(default=0.0, ge=0.0, le=1.0)
    sampled: bool = False
    quantizer: str = "auto"
    taps: Literal["auto"] | tuple[int, ...] = "auto"

    @model_validator(mode="after")
    def _samples_chains(self) -> EagleOptions:
        if self.sampled and self.top_k > 1:
            raise ValueError("sampled goes with chains, top_k 1: a tree has the likeliest children")
        return self
