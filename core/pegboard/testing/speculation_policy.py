"""Contract suite of `SpeculationPolicy`.

    class TestMyPolicy(SpeculationPolicyContract):
        @pytest.fixture
        def make(self):
            return MyPolicy                 # called with a SpeculationContext

A policy can cost time and never change a token; the suite asserts that its answers can be used.
"""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from pegboard.interfaces.speculation_policy import (
    DraftView,
    SpeculationContext,
    SpeculationPolicy,
)

MakePolicy = Callable[[SpeculationContext], SpeculationPolicy]


@st.composite
def rows(draw: st.DrawFn) -> DraftView:
    """A row in any state that an engine can be in."""
    confidences = draw(st.lists(st.floats(0.0, 1.0), max_size=8))
    num_tried = draw(st.integers(0, 1000))
    return DraftView(
        seq_id=draw(st.integers(0, 5)),
        num_drafts=len(confidences),
        confidences=confidences,
        num_tried=num_tried,
        num_accepted=draw(st.integers(0, num_tried)),
        num_left=draw(st.integers(0, 1000)),
    )


_property = settings(deadline=None, suppress_health_check=list(HealthCheck))


class SpeculationPolicyContract:
    """What every policy keeps."""

    @pytest.fixture
    def make(self) -> MakePolicy:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    @_property
    @given(most=st.integers(0, 8), views=st.lists(rows(), min_size=1, max_size=8))
    def test_answers_are_numbers_of_nodes(
        self, make: MakePolicy, most: int, views: list[DraftView]
    ) -> None:
        policy = make(SpeculationContext(most))
        for view in views:
            verify, propose = policy.verify(view), policy.propose(view)
            assert isinstance(verify, int) and 0 <= verify <= view.num_drafts
            assert isinstance(propose, int) and 0 <= propose <= most

    @_property
    @given(view=rows())
    def test_a_row_without_drafts_verifies_none(self, make: MakePolicy, view: DraftView) -> None:
        bare = DraftView(view.seq_id, 0, (), view.num_tried, view.num_accepted, view.num_left)
        assert make(SpeculationContext(4)).verify(bare) == 0

    def test_guesses_that_are_always_right_are_used(self, make: MakePolicy) -> None:
        policy = make(SpeculationContext(4))
        num_tried = num_drafts = 0
        for step in range(50):
            view = DraftView(0, num_drafts, (1.0,) * num_drafts, num_tried, num_tried, 100 - step)
            num_tried += policy.verify(view)
            num_drafts = policy.propose(view)
        assert num_tried > 0
