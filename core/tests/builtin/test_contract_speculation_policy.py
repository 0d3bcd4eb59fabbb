"""The built-in speculation policy keeps its contract."""

from __future__ import annotations

import pytest

from pegboard.builtin.fixed_policy import FixedPolicy
from pegboard.testing.speculation_policy import MakePolicy, SpeculationPolicyContract


class TestFixedPolicy(SpeculationPolicyContract):
    @pytest.fixture
    def make(self) -> MakePolicy:
        return FixedPolicy
