"""Contract suite of `PrefixCache`.

    class TestMyCache(PrefixCacheContract):
        @pytest.fixture
        def make(self):
            return MyCache                  # called with a PrefixCacheContext

The suite plays the engine: it hands out blocks, publishes them, and knows the content of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.prefix_cache import Hit, Prefix, PrefixCache, PrefixCacheContext

MakeCache = Callable[[PrefixCacheContext], PrefixCache]

NUM_BLOCKS = 200

_property = settings(deadline=None, suppress_health_check=list(HealthCheck))


def prefix(tokens: Sequence[int], salt: str = "") -> Prefix:
    """Tokens to look up; read-only, as an engine's are."""
    token_ids = np.array(tokens, np.int32)
    token_ids.setflags(write=False)
    return Prefix(token_ids, salt)


class Published:
    """A cache, and the content of its blocks.

    Attributes:
        cache: under test.
        held: for each group, block to (salt, tokens up to its end), of blocks that it references.
    """

    def __init__(self, make: MakeCache, block_sizes: Sequence[int]) -> None:
        groups = tuple(
            KVGroup((index,), 1, 8, size, None, "none", "float32")
            for index, size in enumerate(block_sizes)
        )
        self.cache = make(PrefixCacheContext(groups, (NUM_BLOCKS,) * len(groups), "model"))
        self.sizes = tuple(block_sizes)
        self.stride = math.lcm(*block_sizes)
        self.held: list[dict[int, tuple[str, tuple[int, ...]]]] = [{} for _ in block_sizes]
        self._next_block = [1] * len(block_sizes)

    def publish(self, tokens: Sequence[int], salt: str = "") -> tuple[list[int], ...]:
        """Publishes the tokens in new blocks, and notes those that the cache took."""
        blocks = tuple(self.new_blocks(group, len(tokens)) for group in range(len(self.sizes)))
        self.publish_blocks(tokens, blocks, salt)
        return blocks

    def publish_blocks(
        self, tokens: Sequence[int], blocks: Sequence[Sequence[int]], salt: str = ""
    ) -> None:
        new = list(self.cache.publish(prefix(tokens, salt), blocks))
        assert len(set(new)) == len(new), "a reference was reported twice"
        for group, block in new:
            assert block in blocks[group], "a block was referenced that was not published"
            assert block not in self.held[group], "a reference is not new"
            end = (blocks[group].index(block) + 1) * self.sizes[group]
            self.held[group][block] = (salt, tuple(tokens[:end]))

    def match(self, tokens: Sequence[int], limit: int | None = None, salt: str = "") -> Hit:
        """A hit, each block of which is checked."""
        limit = len(tokens) if limit is None else limit
        hit = self.cache.match(prefix(tokens, salt), limit)
        assert 0 <= hit.num_tokens <= limit and hit.num_tokens % self.stride == 0
        assert len(hit.blocks) == len(self.sizes)
        for group, size in enumerate(self.sizes):
            assert len(hit.blocks[group]) == hit.num_tokens // size
            for entry, block in enumerate(hit.blocks[group]):
                expected = (salt, tuple(tokens[: (entry + 1) * size]))
                assert self.held[group].get(block) == expected, "a block holds other tokens"
        return hit

    def evict(
        self, group: int, num_blocks: int, evictable: Callable[[int], bool] = lambda block: True
    ) -> list[int]:
        """Evicts, and forgets what the cache forgot."""
        victims = list(self.cache.evict(group, num_blocks, evictable))
        assert len(victims) <= num_blocks and len(set(victims)) == len(victims)
        for block in victims:
            assert evictable(block), "a block that others reference was evicted"
            del self.held[group][block]
        return victims

    def clear(self) -> None:
        """Clears, and checks that every reference is given back."""
        pairs = {(group, block) for group, held in enumerate(self.held) for block in held}
        cleared = list(self.cache.clear())
        assert len(cleared) == len(pairs) and set(cleared) == pairs
        self.held = [{} for _ in self.sizes]

    def new_blocks(self, group: int, num_tokens: int) -> list[int]:
        """Blocks that were never handed out."""
        first = self._next_block[group]
        self._next_block[group] += num_tokens // self.sizes[group]
        return list(range(first, self._next_block[group]))


class PrefixCacheContract:
    """The contract of every cache.

    Attributes:
        keeps: whether the cache keeps anything; False for one that promises `inactive`.
        block_sizes: of its groups, a tuple for each kind of model to test.
    """

    keeps: ClassVar[bool] = True
    block_sizes: ClassVar[tuple[tuple[int, ...], ...]] = ((4,), (2, 4), (1,))

    @pytest.fixture
    def make(self) -> MakeCache:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    def caches(self, make: MakeCache) -> list[Published]:
        """An empty cache for each kind of model."""
        return [Published(make, sizes) for sizes in self.block_sizes]

    def needs_keeping(self) -> None:
        if not self.keeps:
            pytest.skip("the cache keeps nothing")

    def test_an_empty_cache_misses(self, make: MakeCache) -> None:
        for cache in self.caches(make):
            assert cache.match(range(40)).num_tokens == 0
            cache.clear()

    def test_what_was_published_is_found(self, make: MakeCache) -> None:
        self.needs_keeping()
        for cache in self.caches(make):
            blocks = cache.publish(range(16))
            hit = cache.match([*range(16), 99, 98, 97, 96])
            assert hit.num_tokens == 16
            assert [list(group) for group in hit.blocks] == [list(group) for group in blocks]

    def test_a_hit_ends_where_tokens_part(self, make: MakeCache) -> None:
        self.needs_keeping()
        for cache in self.caches(make):
            cache.publish(range(16))
            assert cache.match([*range(9), 99, *range(10, 16)]).num_tokens == (
                9 // cache.stride * cache.stride
            )
            assert cache.match([99, *range(1, 16)]).num_tokens == 0

    def test_a_hit_keeps_within_the_limit(self, make: MakeCache) -> None:
        for cache in self.caches(make):
            cache.publish(range(16))
            for limit in range(17):
                found = cache.match(range(16), limit).num_tokens
                assert not self.keeps or found == limit // cache.stride * cache.stride

    def test_a_longer_sequence_continues_what_is_known(self, make: MakeCache) -> None:
        self.needs_keeping()
        for cache in self.caches(make):
            first = cache.publish(range(8))
            more = [cache.new_blocks(group, 8) for group in range(len(first))]
            both = [[*a, *b] for a, b in zip(first, more, strict=True)]
            cache.publish_blocks(range(16), both)
            assert cache.match(range(16)).num_tokens == 16

    def test_salts_are_kept_apart(self, make: MakeCache) -> None:
        for cache in self.caches(make):
            cache.publish(range(16), salt="a")
            assert cache.match(range(16), salt="b").num_tokens == 0
            assert cache.match(range(16)).num_tokens == 0

    def test_matching_changes_nothing(self, make: MakeCache) -> None:
        for cache in self.caches(make):
            cache.publish(range(16))
            first = cache.match(range(16))
            for _ in range(3):
                cache.match([7, 7, 7, 7, 7, 7, 7, 7])
                assert cache.match(range(16)) == first

    def test_publishing_again_brings_no_reference(self, make: MakeCache) -> None:
        for cache in self.caches(make):
            blocks = cache.publish(range(16))
            before = [dict(held) for held in cache.held]
            cache.publish_blocks(range(16), blocks)
            assert cache.held == before

    def test_the_block_of_nobody_is_not_named(self, make: MakeCache) -> None:
        for cache in self.caches(make):
            blocks = [[0] * (8 // size) for size in cache.sizes]
            assert list(cache.cache.publish(prefix(range(8)), blocks)) == []
            assert cache.match(range(8)).num_tokens == 0

    def test_only_what_nobody_else_references_is_evicted(self, make: MakeCache) -> None:
        for cache in self.caches(make):
            cache.publish(range(16))
            assert cache.evict(0, 2, lambda block: False) == []
            assert cache.evict(0, 0) == []
            if self.keeps:
                assert len(cache.evict(0, 1000)) == 16 // cache.sizes[0]
            assert cache.match(range(16)).num_tokens == 0 and not cache.held[0]

    def test_leaves_are_evicted_first(self, make: MakeCache) -> None:
        self.needs_keeping()
        for cache in self.caches(make):
            cache.publish(range(16))
            cache.evict(0, 1)
            kept = 16 - cache.sizes[0]
            assert cache.match(range(16)).num_tokens == kept // cache.stride * cache.stride

    def test_clearing_gives_every_reference_back(self, make: MakeCache) -> None:
        for cache in self.caches(make):
            cache.publish(range(16))
            cache.publish([*range(8), *range(20, 28)], salt="b")
            cache.clear()
            assert cache.match(range(16)).num_tokens == 0
            cache.clear()

    @_property
    @given(data=st.data())
    def test_random_operations_never_name_a_wrong_block(
        self, make: MakeCache, data: st.DataObject
    ) -> None:
        cache = Published(make, data.draw(st.sampled_from(self.block_sizes)))
        texts = st.lists(st.integers(0, 1), min_size=8, max_size=8)
        salts = st.sampled_from(["", "b"])
        known = [data.draw(texts)]
        for _ in range(data.draw(st.integers(1, 12))):
            match data.draw(st.sampled_from(["publish", "match", "evict"])):
                case "publish":
                    known.append(data.draw(texts))
                    cache.publish(known[-1], data.draw(salts))
                case "match":
                    tokens = data.draw(st.sampled_from(known) | texts)
                    cache.match(tokens, data.draw(st.integers(0, 8)), data.draw(salts))
                case _:
                    group = data.draw(st.integers(0, len(cache.sizes) - 1))
                    busy = data.draw(st.sampled_from([0, 1, 2]))
                    evictable = partial(_is_not_busy, busy)
                    cache.evict(group, data.draw(st.integers(0, 4)), evictable)
        cache.clear()


def _is_not_busy(busy: int, block: int) -> bool:
    """Whether nobody else references a block; `busy` says of which third somebody does."""
    return block % 3 != busy
