"""Names of blocks: keys, collisions, blocks that compete for a name, windows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.prefix_cache import PrefixCacheContext
from pegboard.testing.prefix_cache import Published, prefix
from pegboard_prefix_cache.cache import TrieCache
from pegboard_prefix_cache.tree import HashBlock


def make(
    block_sizes: Sequence[int] = (4,),
    windows: Sequence[int | None] = (None,),
    hash_block: HashBlock = hash,
    num_blocks: int = 1000,
) -> TrieCache:
    groups = tuple(
        KVGroup((index,), 1, 8, size, window, "none", "float32")
        for index, (size, window) in enumerate(zip(block_sizes, windows, strict=True))
    )
    return TrieCache(
        PrefixCacheContext(groups, (num_blocks,) * len(groups), "model"), None, hash_block
    )


@pytest.mark.parametrize("num_values", [256, 1])
def test_a_collision_never_names_other_tokens(num_values: int) -> None:
    """All texts of six blocks of one of three tokens: 1092 blocks share 256 hashes, or one."""
    cache = make((1,), hash_block=lambda block: hash(block) % num_values, num_blocks=2000)
    next_block = itertools.count(1)
    blocks: dict[tuple[int, ...], int] = {}
    texts = list(itertools.product(range(3), repeat=6))
    for text in texts:
        ends = [text[: end + 1] for end in range(6)]
        new = {end: next(next_block) for end in ends if end not in blocks}
        named = cache.publish(prefix(text), [[new.get(end) or blocks[end] for end in ends]])
        assert [block for _, block in named] == list(new.values())
        blocks |= new
    for text in texts:
        assert cache.match(prefix(text), 6).blocks[0] == [blocks[text[: n + 1]] for n in range(6)]
    for tokens in ([3, 0, 0, 0, 0, 0], [0, 0, 3, 0, 0, 0]):
        assert cache.match(prefix(tokens), 6).num_tokens == tokens.index(3)


def test_colliding_names_are_forgotten_one_by_one() -> None:
    cache = make((1,), hash_block=lambda block: 0)
    for token in range(20):
        cache.publish(prefix([token]), [[token + 1]])
    for token in (7, 0, 19, 10):
        assert cache.evict(0, 1, lambda block, wanted=token + 1: block == wanted) == [token + 1]  # type: ignore[misc]
    found = [token for token in range(20) if cache.match(prefix([token]), 1).num_tokens]
    assert found == [token for token in range(20) if token not in (7, 0, 19, 10)]


def test_a_salt_is_no_token_and_a_token_no_salt() -> None:
    """`a` is the text of one token, 97, as a block of one token has it in bytes."""
    cache = make((1,))
    cache.publish(prefix([97, 98], salt=""), [[1, 2]])
    as_text = np.array([97], np.int32).tobytes().decode()
    for salt in ("a", "a\0\0\0", as_text, "model", "model\0"):
        assert cache.match(prefix([98], salt=salt), 1).num_tokens == 0
        assert cache.match(prefix([97, 98], salt=salt), 2).num_tokens == 0
    cache.publish(prefix([98], salt=as_text), [[3]])
    assert cache.match(prefix([97, 98]), 2).blocks[0] == [1, 2]
    assert cache.match(prefix([98], salt=as_text), 1).blocks[0] == [3]


def test_ids_that_differ_in_one_bit_differ() -> None:
    cache = make((2,))
    cache.publish(prefix([1, 2**31 - 1]), [[1]])
    for bit in range(31):
        assert cache.match(prefix([1 ^ (1 << bit), 2**31 - 1]), 2).num_tokens == 0
        assert cache.match(prefix([1, (2**31 - 1) ^ (1 << bit)]), 2).num_tokens == 0


def test_the_same_block_after_other_tokens_is_another() -> None:
    cache = make()
    cache.publish(prefix([1] * 4 + [9] * 4), [[1, 2]])
    assert cache.match(prefix([9] * 4), 4).num_tokens == 0
    assert cache.match(prefix([2] * 4 + [9] * 4), 8).num_tokens == 0


def test_the_first_block_keeps_its_name() -> None:
    cache = make()
    assert cache.publish(prefix(range(8)), [[1, 2]]) == [(0, 1), (0, 2)]
    assert cache.publish(prefix(range(12)), [[3, 4, 5]]) == [(0, 5)]
    assert cache.match(prefix(range(12)), 12).blocks[0] == [1, 2, 5]


def test_a_block_has_one_name() -> None:
    """A second one would be lost with the first."""
    cache = make()
    cache.publish(prefix(range(8)), [[1, 2]])
    assert cache.publish(prefix(range(20, 32)), [[3, 1, 4]]) == [(0, 3), (0, 4)]
    assert cache.match(prefix(range(20, 32)), 12).blocks[0] == [3]
    assert sorted(cache.clear()) == [(0, 1), (0, 2), (0, 3), (0, 4)]


def test_what_was_evicted_in_the_middle_is_filled_again() -> None:
    cache = make()
    cache.publish(prefix(range(12)), [[1, 2, 3]])
    assert cache.evict(0, 1, lambda block: block == 2) == [2]
    assert cache.match(prefix(range(12)), 12).blocks[0] == [1]
    assert cache.publish(prefix(range(12)), [[4, 5, 6]]) == [(0, 5)]
    assert cache.match(prefix(range(12)), 12).blocks[0] == [1, 5, 3]


def test_tokens_past_the_blocks_are_no_concern() -> None:
    cache = make()
    assert cache.publish(prefix(range(10)), [[1, 2]]) == [(0, 1), (0, 2)]
    assert cache.match(prefix(range(10)), 10).num_tokens == 8
    assert cache.match(prefix(range(7)), 7).num_tokens == 4


@pytest.mark.parametrize(
    ("window", "num_needed"), [(2, 1), (4, 1), (5, 1), (6, 2), (9, 2), (10, 3)]
)
def test_a_window_needs_no_more_than_it_sees(window: int, num_needed: int) -> None:
    """A token sees the `window - 1` before it, and so the last ones of 20 in blocks of 4."""
    for num_kept in range(6):
        cache = make((4, 4), (None, window))
        full, windowed = [1, 2, 3, 4, 5], [0] * (5 - num_kept) + [6, 7, 8, 9, 10][5 - num_kept :]
        cache.publish(prefix(range(20)), [full, windowed])
        hit = cache.match(prefix(range(20)), 20)
        assert (hit.num_tokens == 20) == (num_kept >= num_needed)
        if hit.num_tokens == 20:
            assert hit.blocks[0] == full
            assert hit.blocks[1] == [0] * (5 - num_needed) + [6, 7, 8, 9, 10][5 - num_needed :]


def test_a_hit_ends_before_a_gap_that_its_window_would_see() -> None:
    cache = make((4, 4), (None, 8))
    cache.publish(prefix(range(24)), [[1, 2, 3, 4, 5, 6], [1, 2, 3, 0, 5, 6]])
    hit = cache.match(prefix(range(24)), 24)
    assert hit.num_tokens == 24 and hit.blocks[1] == [0, 0, 0, 0, 5, 6]
    assert cache.match(prefix(range(24)), 20).num_tokens == 12
    assert cache.match(prefix(range(24)), 12).blocks[1] == [0, 2, 3]


def test_groups_give_up_their_blocks_apart() -> None:
    cache = make((2, 4), (None, None))
    cache.publish(prefix(range(8)), [[1, 2, 3, 4], [1, 2]])
    assert cache.evict(0, 1, lambda block: True) == [4]
    assert cache.match(prefix(range(8)), 8).blocks == ([1, 2], [1])
    assert cache.evict(1, 9, lambda block: True) == [2, 1]
    assert cache.match(prefix(range(8)), 8).num_tokens == 0
    assert cache.publish(prefix(range(8)), [[9, 8, 7, 6], [5, 4]]) == [(0, 6), (1, 5), (1, 4)]
    assert cache.match(prefix(range(8)), 8).blocks == ([1, 2, 3, 6], [5, 4])


def test_a_cleared_cache_is_as_good_as_new() -> None:
    published = Published(lambda context: TrieCache(context), (4,))
    for _ in range(3):
        blocks = published.publish(range(16), salt="a")
        assert published.match(range(16), salt="a").blocks[0] == blocks[0]
        published.clear()
        assert published.match(range(16), salt="a").num_tokens == 0
