"""The costs of the cache by the number of blocks that it knows, for benchmarks and tests."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.prefix_cache import Prefix, PrefixCacheContext
from pegboard_prefix_cache.cache import TrieCache
from pegboard_prefix_cache.options import TrieOptions
from pegboard_prefix_cache.tree import HashBlock

BLOCKS_A_TEXT = 10
_VOCABULARY = 50_000


@dataclass(frozen=True)
class Costs:
    """Medians of single calls.

    Attributes:
        num_blocks: that the cache knew.
        match_s: seconds to find a known text of 10 blocks.
        publish_s: seconds to name one that is new.
        evict_s: seconds to evict a block.
    """

    num_blocks: int
    match_s: float
    publish_s: float
    evict_s: float


def measure(num_blocks: int, block_size: int = 16, eviction: str = "lru") -> Costs:
    """Fills a cache of so many blocks and times it while it is full: each new text evicts an old one."""
    cache = empty_cache(num_blocks, block_size, eviction)
    texts = known_texts(cache, num_blocks, block_size)
    num_texts = len(texts)
    num_calls = min(500, num_texts)
    order = np.random.default_rng(1).permutation(num_texts)[:num_calls]
    matches, publishes, evictions = [], [], []
    for number in order:
        text = texts[number]
        start = perf_counter()
        cache.match(text, len(text.token_ids))
        matches.append(perf_counter() - start)
    for text in random_texts(num_calls, block_size, seed=2):
        start = perf_counter()
        blocks = cache.evict(0, BLOCKS_A_TEXT, _any)
        evictions.append((perf_counter() - start) / BLOCKS_A_TEXT)
        start = perf_counter()
        cache.publish(text, [blocks])
        publishes.append(perf_counter() - start)
    return Costs(num_blocks, median(matches), median(publishes), median(evictions))


def bytes_per_block(
    num_blocks: int, block_size: int = 16, blocks_a_text: int = BLOCKS_A_TEXT
) -> float:
    """Host memory for each block that a full cache knows."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        cache = empty_cache(num_blocks, block_size)
        for number, text in enumerate(
            random_texts(num_blocks // blocks_a_text, block_size, 0, blocks_a_text)
        ):
            cache.publish(text, [_blocks_of(number, blocks_a_text)])
        return (tracemalloc.get_traced_memory()[0] - before) / num_blocks
    finally:
        tracemalloc.stop()


def empty_cache(
    num_blocks: int, block_size: int = 16, eviction: str = "lru", hash_block: HashBlock = hash
) -> TrieCache:
    """A cache of one KV group, for so many blocks."""
    group = KVGroup((0,), 1, 64, block_size, None, "none", "float32")
    context = PrefixCacheContext((group,), (num_blocks + 1,), "model")
    return TrieCache(context, TrieOptions.model_validate({"eviction": eviction}), hash_block)


def known_texts(cache: TrieCache, num_blocks: int, block_size: int = 16) -> list[Prefix]:
    """Random texts of 10 blocks each, which the cache has been told of."""
    texts = list(random_texts(num_blocks // BLOCKS_A_TEXT, block_size, seed=0))
    for number, text in enumerate(texts):
        cache.publish(text, [_blocks_of(number, BLOCKS_A_TEXT)])
    return texts


def random_texts(
    count: int, block_size: int, seed: int, blocks_a_text: int = BLOCKS_A_TEXT
) -> Iterator[Prefix]:
    """Texts that have nothing in common."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        tokens = rng.integers(0, _VOCABULARY, block_size * blocks_a_text).astype(np.int32)
        tokens.setflags(write=False)
        yield Prefix(tokens, "")


def _blocks_of(number: int, num_blocks: int) -> list[int]:
    return list(range(number * num_blocks + 1, (number + 1) * num_blocks + 1))


def _any(block: int) -> bool:
    return True
