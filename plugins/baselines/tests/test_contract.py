"""The plugin keeps the contracts of what it provides."""

from __future__ import annotations

import pytest

from pegboard.testing.kv_allocator import KVAllocatorContract, MakeAllocator
from pegboard.testing.scheduler import MakeScheduler, SchedulerContract
from pegboard_baselines.contiguous import ContiguousAllocator
from pegboard_baselines.static import StaticBatch


class TestContiguousAllocator(KVAllocatorContract):
    @pytest.fixture
    def make(self) -> MakeAllocator:
        return ContiguousAllocator


class TestStaticBatch(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return StaticBatch
