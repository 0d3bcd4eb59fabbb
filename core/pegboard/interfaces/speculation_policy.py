"""`SpeculationPolicy`: how many drafts each sequence may verify."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

VERSION = 1


@dataclass(frozen=True, slots=True)
class SpeculationContext:
    """The context of a policy's factory.

    Attributes:
        num_speculative_tokens: the config's number, or the drafter's own default.
    """

    num_speculative_tokens: int


class DraftView(NamedTuple):
    """A row that samples in the step, and may have drafts.

    Attributes:
        seq_id: the sequence.
        num_drafts: nodes that it holds.
        confidences: the drafter's probability of each node; 1 where drafts are verified by rejection.
        parents: of each node, the number of its parent, which precedes it; -1: the last known token.
        num_tried, num_accepted: over its lifetime, depths compared and accepted.
        num_left: output tokens that it may still produce.
        max_nodes: most nodes that it may have: the request's own number, or the config's.
    """

    seq_id: int
    num_drafts: int
    confidences: Sequence[float]
    parents: Sequence[int]
    num_tried: int
    num_accepted: int
    num_left: int
    max_nodes: int


class Choice(NamedTuple):
    """The answer for one row.

    Attributes:
        verify: how many of its nodes this step checks, the first ones, 0 to `num_drafts`.
        propose: how many nodes the drafter may propose for the next step, 0 to
            `num_speculative_tokens`.
    """

    verify: int
    propose: int


class StepCosts(Protocol):
    """Seconds that the workers take, from the steps so far; recent ones count for more. A larger size
    takes no less than a smaller one. Between sizes that were measured the seconds lie on a straight line;
    beyond the largest they are its own, and below the least they fall, so that sizes which were never
    tried look good; before the first measurement they are 0."""

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes without drafts."""

    def step_s(self, num_tokens: int) -> float:
        """Seconds of forward and sampling in a step of so many tokens, draft nodes included.

        Steps without a prompt's chunk are what counts; those with one, which sample less, stand in only
        for sizes beyond them.
        """

    def steps_s(self, first: int, last: int) -> NDArray[np.float64]:
        """The same of each number of tokens from the first to the last."""

    def draft_s(self, num_nodes: int) -> float:
        """Seconds of drafting in a step with about as many rows as this one that asks for so many nodes of
        a row, the one of which it asks for most. 0 nodes: of observing alone."""


class SpeculationPolicy(ABC):
    """Decides for each step. It can cost time, never change a token.

    A policy that raises, answers anything but what it may, or takes more than half as long as the
    workers' steps, is cut off: there are no drafts until it is tried again, after a pause.
    """

    @abstractmethod
    def choose(
        self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts
    ) -> Sequence[Choice]:
        """Drafts of one step. Called once a step, when all else is planned.

        Where there is no room, fewer nodes are used than the answer says: in the order of the rows,
        until `tokens_left` are spent; as many as blocks are free for; and no more than the sequence may
        have, or still produce.

        Args:
            rows: all that sample, but for those that may have no drafts.
            tokens_left: draft nodes that the step has room for.
            costs: valid during the call.

        Returns:
            A list or tuple with a choice for each row, in their order.
        """
