"""`SpeculationPolicy`: how many drafts each sequence may verify."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

VERSION = 0


@dataclass(frozen=True, slots=True)
class SpeculationContext:
    """What a policy's factory gets.

    Attributes:
        num_speculative_tokens: the config's number, or the drafter's own default.
    """

    num_speculative_tokens: int


@dataclass(frozen=True, slots=True)
class DraftView:
    """A row that could speculate.

    Attributes:
        seq_id: the sequence.
        num_drafts: nodes that it holds.
        confidences: the drafter's probability of each node.
        num_tried, num_accepted: over its lifetime, depths compared and accepted.
        num_left: output tokens that it may still produce.
    """

    seq_id: int
    num_drafts: int
    confidences: Sequence[float]
    num_tried: int
    num_accepted: int
    num_left: int


class SpeculationPolicy(ABC):
    """Decides per row and step. It can cost time, never change a token: an answer out of range is
    brought into it, one that is no whole number is 0, and observers are told."""

    @abstractmethod
    def verify(self, row: DraftView) -> int:
        """How many of the row's nodes this step checks, 0 to num_drafts."""

    @abstractmethod
    def propose(self, row: DraftView) -> int:
        """How many nodes the drafter may propose for the next step, 0 to num_speculative_tokens."""
