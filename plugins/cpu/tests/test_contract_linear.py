from __future__ import annotations

from typing import ClassVar

import pytest

from pegboard.testing.kernels import LinearContract, MakeKernel
from pegboard_cpu.kernels import cpu_kernel


class CPULinears(LinearContract):
    """Made by the plugin's factory, which picks by format."""

    row_invariant: ClassVar[bool] = True

    @pytest.fixture
    def make(self) -> MakeKernel:
        return cpu_kernel


class TestFloat(CPULinears):
    pass


class TestCodes(CPULinears):
    formats: ClassVar[tuple[str, ...]] = ("uint4", "int8")


class TestGroupedInputs(CPULinears):
    formats: ClassVar[tuple[str, ...]] = ("uint4:grouped", "int8:grouped")


class TestWholeInputs(CPULinears):
    formats: ClassVar[tuple[str, ...]] = ("int8:dynamic", "int8:static")


class TestFloat8(CPULinears):
    formats: ClassVar[tuple[str, ...]] = ("float8", "float8:dynamic", "float8:static")
