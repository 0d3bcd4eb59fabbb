"""The built-in cache, which keeps nothing, and the suites' own reference keep their contract."""

from __future__ import annotations

import pytest

from pegboard.builtin.no_cache import NoCache
from pegboard.testing.dict_cache import DictCache
from pegboard.testing.prefix_cache import MakeCache, PrefixCacheContract


class TestNoCache(PrefixCacheContract):
    keeps = False

    @pytest.fixture
    def make(self) -> MakeCache:
        return NoCache


class TestDictCache(PrefixCacheContract):
    @pytest.fixture
    def make(self) -> MakeCache:
        return DictCache
