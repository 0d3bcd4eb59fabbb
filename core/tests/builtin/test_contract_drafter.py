"""The built-in drafter, which guesses nothing, and the suites' own keep their contract."""

from __future__ import annotations

import pytest

from pegboard.builtin.no_drafter import NoDrafter
from pegboard.testing.drafter import DrafterContract, MakeDrafter
from pegboard.testing.guessing_drafter import GuessingDrafter


class TestNoDrafter(DrafterContract):
    @pytest.fixture
    def make(self) -> MakeDrafter:
        return NoDrafter


class TestGuessingDrafter(DrafterContract):
    @pytest.fixture(params=[1, 2], ids=["chains", "trees"])
    def make(self, request: pytest.FixtureRequest) -> MakeDrafter:
        prompt, coming = tuple(self.text(20)), self.text(60)[20:]
        return lambda context: GuessingDrafter({(prompt, 0): coming}, 1.0, request.param)
