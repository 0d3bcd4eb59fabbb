"""The scheduler keeps the contract of its interface."""

from __future__ import annotations

import pytest

from pegboard.testing.scheduler import MakeScheduler, SchedulerContract
from pegboard_shortest_first.options import Options
from pegboard_shortest_first.scheduler import ShortestFirst


class TestShortestFirst(SchedulerContract):
    @pytest.fixture(params=[0.0, 10.0])
    def make(self, request: pytest.FixtureRequest) -> MakeScheduler:
        return lambda context: ShortestFirst(context, Options(max_wait=request.param))
