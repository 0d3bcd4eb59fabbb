from __future__ import annotations

import pytest

from pegboard.testing.kernels import LinearContract, MakeKernel
from pegboard_cpu.linear import CPULinear


class TestCPULinear(LinearContract):
    row_invariant = True

    @pytest.fixture
    def make(self) -> MakeKernel:
        return CPULinear
