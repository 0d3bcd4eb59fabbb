"""The built-in allocator keeps its contracts."""

from __future__ import annotations

import pytest

from pegboard.builtin.paged_allocator import PagedAllocator
from pegboard.testing.kv_allocator import MakeAllocator, PinnedBlocksContract


class TestPagedAllocator(PinnedBlocksContract):
    @pytest.fixture
    def make(self) -> MakeAllocator:
        return PagedAllocator
