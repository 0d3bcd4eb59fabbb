"""Contract suite of `SpeculationPolicy`.

    class TestMyPolicy(SpeculationPolicyContract):
        @pytest.fixture
        def make(self):
            return MyPolicy                 # called with a SpeculationContext

A policy can cost time and never change a token; the suite asserts that its answers can be used, so that
the engine does not cut it off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray

from pegboard.interfaces.speculation_policy import (
    DraftView,
    SpeculationContext,
    SpeculationPolicy,
)

MakePolicy = Callable[[SpeculationContext], SpeculationPolicy]


@dataclass(frozen=True)
class LinearCosts:
    """Costs of a worker that takes so long for a step, and so long for each token and node.

    Attributes:
        num_tokens: of the step, without drafts.
        base_s, token_s, node_s: seconds; all 0: nothing was measured yet.
    """

    num_tokens: int = 1
    base_s: float = 0.0
    token_s: float = 0.0
    node_s: float = 0.0

    def step_s(self, num_tokens: int) -> float:
        return self.base_s + self.token_s * num_tokens

    def steps_s(self, first: int, last: int) -> NDArray[np.float64]:
        return self.base_s + self.token_s * np.arange(first, last + 1.0)

    def draft_s(self, num_nodes: int) -> float:
        return self.node_s * num_nodes


@st.composite
def views(draw: st.DrawFn, seq_id: int = 0) -> DraftView:
    """A row in any state that an engine can be in."""
    confidences = draw(st.lists(st.sampled_from([0.0, 1e-9, 0.3, 0.9, 1.0]), max_size=8))
    is_chain = draw(st.booleans())
    num_tried = draw(st.integers(0, 1000))
    return DraftView(
        seq_id=seq_id,
        num_drafts=len(confidences),
        confidences=confidences,
        parents=range(-1, len(confidences) - 1) if is_chain else [-1] * len(confidences),
        num_tried=num_tried,
        num_accepted=draw(st.integers(0, num_tried)),
        max_nodes=draw(st.integers(max(1, len(confidences)), 8)),
        num_left=draw(st.integers(1, 1000)),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[DraftView], int, LinearCosts]:
    """The arguments of one call of `choose`."""
    rows = [draw(views(seq_id)) for seq_id in range(draw(st.integers(1, 5)))]
    seconds = st.sampled_from([0.0, 1e-6, 1e-3, 1.0])
    costs = LinearCosts(
        num_tokens=len(rows) + draw(st.integers(0, 500)),
        base_s=draw(seconds),
        token_s=draw(seconds),
        node_s=draw(seconds),
    )
    return rows, draw(st.integers(0, 64)), costs


_property = settings(deadline=None, suppress_health_check=list(HealthCheck))


class SpeculationPolicyContract:
    """The contract of every policy."""

    @pytest.fixture
    def make(self) -> MakePolicy:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    @_property
    @given(most=st.integers(0, 8), asked=st.lists(steps(), min_size=1, max_size=3))
    def test_each_row_gets_numbers_of_nodes(
        self,
        make: MakePolicy,
        most: int,
        asked: list[tuple[list[DraftView], int, LinearCosts]],
    ) -> None:
        policy = make(SpeculationContext(most))
        for rows, tokens_left, costs in asked:
            choices = policy.choose(rows, tokens_left, costs)
            assert isinstance(choices, list | tuple) and len(choices) == len(rows)
            for row, (verify, propose) in zip(rows, choices, strict=True):
                assert isinstance(verify, int) and 0 <= verify <= row.num_drafts
                assert isinstance(propose, int) and 0 <= propose <= most

    def test_guesses_that_are_always_right_are_used(self, make: MakePolicy) -> None:
        policy = make(SpeculationContext(4))
        costs = LinearCosts(base_s=0.01)
        num_tried = num_drafts = 0
        for step in range(50):
            row = DraftView(
                seq_id=0,
                num_drafts=num_drafts,
                confidences=(1.0,) * num_drafts,
                parents=range(-1, num_drafts - 1),
                num_tried=num_tried,
                num_accepted=num_tried,
                max_nodes=4,
                num_left=100 - step,
            )
            [(verify, num_drafts)] = policy.choose([row], 64, costs)
            num_tried += verify
        assert num_tried > 0
