"""The contract of prefix caches, for each policy, and where every hash collides with many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from pegboard.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
from pegboard.testing.prefix_cache import PrefixCacheContract
from pegboard_prefix_cache.cache import TrieCache
from pegboard_prefix_cache.options import TrieOptions

MakeCache = Callable[[PrefixCacheContext], PrefixCache]


def eight_bits(block: tuple[int, bytes]) -> int:
    return hash(block) & 0xFF


class TestLeastRecentlyUsed(PrefixCacheContract):
    @pytest.fixture
    def make(self) -> MakeCache:
        return TrieCache


class TestLeastImportant(PrefixCacheContract):
    @pytest.fixture
    def make(self) -> MakeCache:
        return partial(TrieCache, options=TrieOptions(eviction="priority"))


class TestHashOfEightBits(PrefixCacheContract):
    @pytest.fixture
    def make(self) -> MakeCache:
        return partial(TrieCache, hash_block=eight_bits)


class TestConstantHash(PrefixCacheContract):
    @pytest.fixture
    def make(self) -> MakeCache:
        return partial(TrieCache, hash_block=lambda block: 7)
