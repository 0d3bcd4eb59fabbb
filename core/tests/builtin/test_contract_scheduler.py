"""The built-in scheduler keeps its contract."""

from __future__ import annotations

import pytest

from pegboard.builtin.fcfs import FCFS
from pegboard.testing.scheduler import MakeScheduler, SchedulerContract


class TestFCFS(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return FCFS
