"""The built-in executor keeps its contract."""

from __future__ import annotations

import pytest

from pegboard.builtin.local_executor import LocalExecutor
from pegboard.testing.executor import ExecutorContract, MakeExecutor


class TestLocalExecutor(ExecutorContract):
    @pytest.fixture
    def make(self) -> MakeExecutor:
        return LocalExecutor
