"""The policies keep the contract of their interface."""

from __future__ import annotations

import pytest

from pegboard.testing.scheduler import MakeScheduler, SchedulerContract
from pegboard_schedulers.fair import Fair
from pegboard_schedulers.options import (
    FairOptions,
    PrefixAwareOptions,
    PriorityOptions,
    ShortestOptions,
)
from pegboard_schedulers.prefix_aware import PrefixAware
from pegboard_schedulers.priority import Priority
from pegboard_schedulers.reserve import Reserve
from pegboard_schedulers.shortest import Shortest


class TestPriority(SchedulerContract):
    @pytest.fixture(params=[None, 0.5, 60.0])
    def make(self, request: pytest.FixtureRequest) -> MakeScheduler:
        return lambda context: Priority(context, PriorityOptions(max_wait=request.param))


class TestPrefixAware(SchedulerContract):
    @pytest.fixture(params=[(1, 0), (2, 1), (64, 64)])
    def make(self, request: pytest.FixtureRequest) -> MakeScheduler:
        window, max_overtakes = request.param
        options = PrefixAwareOptions(window=window, max_overtakes=max_overtakes)
        return lambda context: PrefixAware(context, options)


class TestFair(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return lambda context: Fair(context, FairOptions(weights={"a": 3.0}))


class TestReserve(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return Reserve


class TestShortest(SchedulerContract):
    @pytest.fixture(params=[0.5, 100.0])
    def make(self, request: pytest.FixtureRequest) -> MakeScheduler:
        return lambda context: Shortest(context, ShortestOptions(max_wait=request.param))
