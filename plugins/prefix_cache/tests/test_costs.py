"""The cost of a call does not grow with what the cache knows, and a name costs little memory."""

from __future__ import annotations

from collections import Counter

import pytest

from pegboard_prefix_cache.costs import (
    BLOCKS_A_TEXT,
    bytes_per_block,
    empty_cache,
    known_texts,
    measure,
    random_texts,
)
from pegboard_prefix_cache.eviction import LeastRecentlyUsed, Rank
from pegboard_prefix_cache.node import Node

BYTES_OF_KV = 30 * 3 * 64 * 2 * 4 * 16
"""Of a block of 16 tokens of SmolLM2-135M in float32."""

NUM_BLOCKS = [1000, 100_000]
MILLION = pytest.param(1_000_000, marks=pytest.mark.slow)


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often eviction looks at a node."""
    counts: Counter[str] = Counter()
    rank = LeastRecentlyUsed.rank

    def counting(self: LeastRecentlyUsed, node: Node) -> Rank:
        counts["rank"] += 1
        return rank(self, node)

    monkeypatch.setattr(LeastRecentlyUsed, "rank", counting)
    return counts


@pytest.mark.parametrize("num_blocks", [*NUM_BLOCKS, MILLION])
def test_calls_do_the_same_work_however_much_is_known(
    num_blocks: int, ranked: Counter[str]
) -> None:
    hashed: Counter[str] = Counter()

    def counting_hash(block: tuple[int, bytes]) -> int:
        hashed["block"] += 1
        return hash(block)

    cache = empty_cache(num_blocks, hash_block=counting_hash)
    texts = known_texts(cache, num_blocks)
    hashed.clear()
    for text in texts[:50]:
        assert cache.match(text, len(text.token_ids)).num_tokens == len(text.token_ids)
    assert hashed["block"] == 50 * BLOCKS_A_TEXT
    ranked.clear()
    for text in random_texts(50, 16, seed=3):
        blocks = [block for _ in range(10) for block in cache.evict(0, 1, lambda block: True)]
        assert len(cache.publish(text, [blocks])) == BLOCKS_A_TEXT
    assert ranked["rank"] <= 3 * 50 * BLOCKS_A_TEXT


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_calls_take_the_same_time_however_much_is_known(eviction: str) -> None:
    """A thousand times as many names: memory that is not in the caches costs some, the tree nothing."""
    few, many = measure(1000, eviction=eviction), measure(1_000_000, eviction=eviction)
    assert many.match_s < 6 * few.match_s
    assert many.evict_s < 6 * few.evict_s


@pytest.mark.slow
@pytest.mark.parametrize("blocks_a_text", [1, 10, 100])
def test_a_name_takes_a_thousandth_of_what_it_names(blocks_a_text: int) -> None:
    assert bytes_per_block(100_000, blocks_a_text=blocks_a_text) < BYTES_OF_KV / 1000


def test_a_name_takes_little_memory() -> None:
    assert bytes_per_block(5000) < BYTES_OF_KV / 1000


def test_nothing_is_left_of_what_was_evicted() -> None:
    """A thousand blocks, one text after the other; and tokens for which no block is left."""
    cache = empty_cache(1000)
    known_texts(cache, 1000)
    for text in random_texts(2000, 16, seed=4):
        cache.publish(text, [cache.evict(0, BLOCKS_A_TEXT, lambda block: True)])
    for text in random_texts(20, 16, seed=5):
        assert not cache.publish(text, [range(1, BLOCKS_A_TEXT + 1)]), "all have names"
    assert len(cache.evict(0, 10**9, lambda block: True)) == 1000
    (tree,) = cache._trees
    assert not tree._nodes and not tree._roots
