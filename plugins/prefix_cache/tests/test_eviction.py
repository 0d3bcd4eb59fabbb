"""Which block goes first, and what it costs to find it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import pytest

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.prefix_cache import Prefix, PrefixCacheContext
from pegboard.testing.prefix_cache import prefix
from pegboard_prefix_cache.cache import TrieCache
from pegboard_prefix_cache.options import TrieOptions


def make(eviction: str = "lru", window: int | None = None, num_blocks: int = 10_000) -> TrieCache:
    group = KVGroup((0,), 1, 8, 1, window, "none", "float32")
    options = TrieOptions.model_validate({"eviction": eviction})
    return TrieCache(PrefixCacheContext((group,), (num_blocks,), "model"), options)


def of(tokens: Iterable[int], priority: int = 0) -> Prefix:
    plain = prefix(list(tokens))
    return Prefix(plain.token_ids, plain.salt, priority)


def anything(block: int) -> bool:
    return True


def evict_all(cache: TrieCache, evictable: Callable[[int], bool] = anything) -> list[int]:
    """One after the other, as a pool in need asks."""
    victims: list[int] = []
    while found := cache.evict(0, 1, evictable):
        victims += found
    return victims


class Asked:
    """Whether a block is evictable: not those in use. Counts how often it is asked."""

    def __init__(self, in_use: Iterable[int] = ()) -> None:
        self.in_use = set(in_use)
        self.count = 0

    def __call__(self, block: int) -> bool:
        self.count += 1
        return block not in self.in_use


def test_the_least_recently_used_goes_first() -> None:
    cache = make()
    for block, token in enumerate([10, 20, 30], start=1):
        cache.publish(of([token]), [[block]])
    cache.use(of([10]), 1)
    assert evict_all(cache) == [2, 3, 1]


def test_publishing_again_is_a_use() -> None:
    cache = make()
    cache.publish(of([10]), [[1]])
    cache.publish(of([20]), [[2]])
    cache.publish(of([10]), [[1]])
    assert evict_all(cache) == [2, 1]


def test_matching_is_no_use() -> None:
    cache = make()
    cache.publish(of([10]), [[1]])
    cache.publish(of([20]), [[2]])
    cache.match(of([10]), 1)
    assert evict_all(cache) == [1, 2]


def test_a_beginning_is_as_recent_as_what_follows_it() -> None:
    cache = make()
    cache.publish(of([1, 2, 3]), [[1, 2, 3]])
    cache.publish(of([7, 8]), [[4, 5]])
    cache.publish(of([1, 2, 9]), [[1, 2, 6]])
    assert evict_all(cache) == [3, 5, 4, 6, 2, 1]


def test_use_of_a_beginning_does_not_save_what_follows() -> None:
    cache = make()
    cache.publish(of([1, 2, 3]), [[1, 2, 3]])
    cache.publish(of([7, 8]), [[4, 5]])
    cache.use(of([1, 2, 3]), 2)
    assert evict_all(cache) == [3, 5, 4, 2, 1]


@pytest.mark.parametrize("seed", range(30))
def test_the_order_is_that_of_the_whole_paths_times(seed: int) -> None:
    """Each use stamps all beginnings of the text; of those that nothing follows, the oldest goes."""
    rng, cache = random.Random(seed), make()
    blocks: dict[tuple[int, ...], int] = {}
    times: dict[tuple[int, ...], int] = {}
    for now in range(200):
        text = tuple(rng.choices(range(2), k=rng.randint(1, 7)))
        ends = [text[: n + 1] for n in range(len(text))]
        known = [end for end in ends if end in blocks]
        if rng.random() < 0.4:
            cache.use(of(text), len(known))
            times |= dict.fromkeys(known, now)
        elif rng.random() < 0.6:
            fresh = iter(sorted(set(range(1, 500)) - set(blocks.values())))
            blocks |= {end: next(fresh) for end in ends if end not in blocks}
            cache.publish(of(text), [[blocks[end] for end in ends]])
            times |= dict.fromkeys(ends, now)
        elif blocks:
            parents = {end[:-1] for end in blocks}
            oldest = min((end for end in blocks if end not in parents), key=lambda end: times[end])
            assert cache.evict(0, 1, anything) == [blocks.pop(oldest)]


def test_blocks_of_the_least_important_go_first() -> None:
    cache = make("priority")
    for block, priority in enumerate([0, 5, -3, 5, 0], start=1):
        cache.publish(of([block], priority), [[block]])
    assert evict_all(cache) == [2, 4, 1, 5, 3]


def test_what_an_important_request_shares_is_important() -> None:
    cache = make("priority")
    cache.publish(of([1, 2, 3], 5), [[1, 2, 3]])
    cache.publish(of([7, 8], 0), [[4, 5]])
    cache.use(of([1, 2], -1), 2)
    assert evict_all(cache) == [3, 5, 4, 2, 1]
    cache.publish(of([1, 2], 5), [[1, 2]])
    cache.publish(of([7, 8], 0), [[4, 5]])
    assert evict_all(cache) == [2, 1, 5, 4], "importance ends with the block"


def test_a_lesser_use_takes_no_importance_away() -> None:
    cache = make("priority")
    cache.publish(of([1], 0), [[1]])
    cache.use(of([1], 9), 1)
    cache.publish(of([2], 5), [[2]])
    assert evict_all(cache) == [2, 1]


def test_a_beginning_stays_as_important_as_what_followed_it() -> None:
    cache = make("priority")
    cache.publish(of([1], 9), [[1]])
    cache.publish(of([1, 2], 0), [[1, 2]])
    assert cache.evict(0, 1, anything) == [2]
    cache.publish(of([5], 3), [[3]])
    assert evict_all(cache) == [3, 1]


def test_the_important_child_of_an_unimportant_beginning_keeps_it() -> None:
    cache = make("priority")
    cache.publish(of([1], 9), [[1]])
    cache.publish(of([1, 2], 0), [[1, 2]])
    cache.publish(of([5], 3), [[3]])
    assert evict_all(cache) == [3, 2, 1]


@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_a_block_that_is_let_go_can_be_evicted_again(eviction: str) -> None:
    cache, asked = make(eviction), Asked([1, 2, 3])
    for block in range(1, 7):
        cache.publish(of([block]), [[block]])
    assert evict_all(cache, asked) == [4, 5, 6]
    asked.in_use = {1, 3}
    assert evict_all(cache, asked) == [2]
    asked.in_use = set()
    assert sorted(evict_all(cache, asked)) == [1, 3]


def test_what_was_in_use_is_not_forgotten_behind_all_others() -> None:
    """A block that was held once when others were wanted gets its turn again, as of that time."""
    cache, asked = make(), Asked([1])
    for block in range(1, 11):
        cache.publish(of([block]), [[block]])
    assert cache.evict(0, 2, asked) == [2, 3]
    asked.in_use = set()
    for block in range(11, 21):
        cache.publish(of([block]), [[block]])
    order = evict_all(cache, asked)
    assert order == [4, 5, 6, 7, 8, 9, 10, 1, *range(11, 21)]


def test_the_beginning_is_evicted_when_all_that_follows_is_in_use() -> None:
    """Two sequences computed the same beginning; the one whose blocks have the names has ended."""
    cache, asked = make(), Asked([5, 6])
    cache.publish(of([1, 2, 3]), [[1, 2, 3]])
    cache.publish(of([1, 2, 3, 4, 5]), [[7, 8, 9, 5, 6]])
    assert cache.evict(0, 2, asked) == [3, 2]
    assert cache.evict(0, 2, asked) == [1]
    assert cache.evict(0, 2, asked) == []
    asked.in_use = set()
    assert cache.evict(0, 9, asked) == [6, 5]
    assert cache.match(of([1, 2, 3, 4, 5]), 5).num_tokens == 0


def test_blocks_of_a_window_go_in_order_of_use_alone() -> None:
    cache = make(window=3)
    cache.publish(of(range(4)), [[1, 2, 3, 4]])
    cache.publish(of([9]), [[5]])
    cache.use(of(range(4)), 4)
    assert evict_all(cache) == [2, 1, 5, 4, 3], "the window of the last use holds 3 and 4"


def test_names_are_gone_before_their_blocks_return() -> None:
    cache = make()
    cache.publish(of([1, 2, 3]), [[1, 2, 3]])

    def evictable(block: int) -> bool:
        assert block in cache.match(of([1, 2, 3]), 3).blocks[0]
        return True

    for left in (2, 1, 0):
        (block,) = cache.evict(0, 1, evictable)
        assert block == left + 1
        assert cache.match(of([1, 2, 3]), 3).num_tokens == left


def fill(cache: TrieCache, texts: Sequence[int], num_blocks: int) -> None:
    """Texts of so many blocks each; the number of block b of text t is t * num_blocks + b + 1."""
    for text in texts:
        first = text * num_blocks + 1
        tokens = range(10 * text, 10 * text + num_blocks)
        cache.publish(of(tokens), [list(range(first, first + num_blocks))])


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_blocks_in_use_do_not_make_eviction_slow(eviction: str, window: int | None) -> None:
    """1000 sequences run while one text after another comes and is evicted again: each eviction asks
    for a few blocks, not for those of all that runs."""
    cache = make(eviction, window)
    fill(cache, range(500), 2)
    asked = Asked(range(1, 1001))
    asked.count = 0
    for block in range(2000, 6000):
        cache.publish(of([100_000 + block]), [[block]])
        assert cache.evict(0, 1, asked) == [block]
    assert asked.count < 4 * 4000 + 1000


def test_sequences_that_end_in_any_order_are_found_at_once_on_average() -> None:
    """A full pool, of which nothing but what just ended can be evicted."""
    cache, asked, rng = make(), Asked(range(1, 2001)), random.Random(0)
    fill(cache, range(100), 20)
    running = list(range(100))
    num_evicted = 0
    while running:
        text = running.pop(rng.randrange(len(running)))
        asked.in_use -= set(range(20 * text + 1, 20 * text + 21))
        num_evicted += len(evict_all_of(cache, 20, asked))
    assert num_evicted == 2000
    assert asked.count < 10 * num_evicted


def evict_all_of(cache: TrieCache, num_blocks: int, evictable: Callable[[int], bool]) -> list[int]:
    return [block for _ in range(num_blocks) for block in cache.evict(0, 1, evictable)]
