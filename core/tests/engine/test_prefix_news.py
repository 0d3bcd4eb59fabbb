"""News of the prefix cache's names for observers, and resets."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pegboard.engine.prefix.known_blocks import KnownBlocks
from pegboard.errors import EngineError
from pegboard.interfaces.kv_allocator import Growth, KVLedger
from pegboard.interfaces.observer import BlocksNamed, Event, LoadChanged, Observer

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]
Name = tuple[int, bytes]


class Following(Observer):
    """Knows the names, from what it hears alone."""

    def __init__(self) -> None:
        self.names: set[Name] = set()
        self.events: list[BlocksNamed] = []
        self.num_evicted = 0
        self.told: list[type] = []
        self.ledgers: list[tuple[KVLedger, ...]] = []

    def observe(self, event: Event) -> None:
        self.told.append(type(event))
        if isinstance(event, LoadChanged):
            self.ledgers.append(event.kv)
        if not isinstance(event, BlocksNamed):
            return
        self.events.append(event)
        assert event.number == len(self.events)
        assert event.stored or event.evicted or event.cleared
        if event.cleared:
            self.names.clear()
        assert self.names.isdisjoint(event.stored) and self.names.issuperset(event.evicted)
        assert len(set(event.stored)) == len(event.stored)
        self.names |= set(event.stored)
        self.names -= set(event.evicted)
        self.num_evicted += len(event.evicted)

    def close(self) -> None:
        pass


def num_names(cache: Any) -> list[int]:
    return [len(names) for names in cache.names]


@pytest.mark.parametrize("sizes", [{}, {"block_sizes": (2, 4), "windows": (None, 12)}])
def test_who_follows_the_events_knows_the_names(
    bench: Make, dict_cache: Any, expected: Expected, sizes: dict[str, Any]
) -> None:
    following = Following()
    num_groups = len(sizes.get("block_sizes", (4,)))
    engine = bench(
        cache=dict_cache, num_blocks=41, observers=(following,), max_num_batched_tokens=24, **sizes
    )
    chance = random.Random(7)
    prompts = {
        f"{number}": [chance.randrange(2)] * chance.randrange(4, 20) + [number] * 5
        for number in range(30)
    }
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=chance.randrange(1, 20))
        for _ in range(chance.randrange(4)):
            num_heard = len(following.events)
            engine.step()
            assert len(following.events) <= num_heard + 1
            told = [len([n for n in following.names if n[0] == g]) for g in range(num_groups)]
            assert told == num_names(engine.cache)
    engine.run()
    assert following.num_evicted > 10, "the pool was too large for this test"


def test_a_digest_says_all_tokens_up_to_the_blocks_end(bench: Make, dict_cache: Any) -> None:
    def names(prompt: list[int]) -> set[Name]:
        following = Following()
        engine = bench(cache=dict_cache, observers=(following,))
        engine.add("a", prompt, max_tokens=1)
        engine.run()
        return following.names

    first = names([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert names([1, 2, 3, 4, 5, 6, 7, 8, 9]) == first
    assert len(first) == 2 and all(len(digest) == 16 for _, digest in first)
    assert len(first & names([1, 2, 3, 4, 0, 6, 7, 8, 9])) == 1
    assert not first & names([0, 2, 3, 4, 5, 6, 7, 8, 9])


def test_an_idle_engine_tells_of_a_reset_at_once(bench: Make, dict_cache: Any) -> None:
    following = Following()
    engine = bench(cache=dict_cache, observers=(following,))
    engine.add("a", range(20), max_tokens=2)
    engine.run()
    before = set(following.names)
    assert before
    engine.core.reset_prefix_cache()
    assert following.told[-2:] == [BlocksNamed, LoadChanged] and following.events[-1].cleared
    assert following.ledgers[-1] == engine.core.ledger()
    assert not following.names and num_names(engine.cache) == [0]
    assert engine.core.ledger()[0].free == engine.core.ledger()[0].total
    engine.add("b", range(20), max_tokens=2)
    assert engine.run()["b", 0].last.num_cached_tokens == 0
    assert following.names == before


def test_what_runs_through_a_reset_goes_on_and_is_not_named(
    bench: Make, dict_cache: Any, expected: Expected
) -> None:
    following = Following()
    engine = bench(cache=dict_cache, observers=(following,), max_num_batched_tokens=16)
    engine.add("long", range(40), max_tokens=20)
    engine.step()
    engine.core.reset_prefix_cache()
    engine.step()
    engine.core.reset_prefix_cache()
    outputs = engine.run()
    assert outputs["long", 0].token_ids == expected(range(40), 20)
    assert not following.names and num_names(engine.cache) == [0]
    engine.add("again", range(40), max_tokens=20)
    outputs = engine.run()
    assert outputs["again", 0].last.num_cached_tokens == 0
    assert outputs["again", 0].token_ids == expected(range(40), 20)
    assert following.names


def test_a_sequence_preempted_after_a_reset_is_computed_and_named_anew(
    bench: Make, dict_cache: Any, expected: Expected
) -> None:
    engine = bench(cache=dict_cache, num_blocks=17, max_model_len=60, max_num_batched_tokens=16)
    for name in "ab":
        engine.add(name, [ord(name) % 90] * 20, max_tokens=36)
    engine.step()
    engine.core.reset_prefix_cache()
    outputs = engine.run()
    for name in "ab":
        assert outputs[name, 0].token_ids == expected([ord(name) % 90] * 20, 36)
    assert num_names(engine.cache) != [0]


def test_a_reset_without_a_prefix_cache_does_nothing(bench: Make, expected: Expected) -> None:
    following = Following()
    engine = bench(observers=(following,), caches_prefixes=False)
    engine.add("a", range(20), max_tokens=3)
    engine.step()
    engine.core.reset_prefix_cache()
    assert engine.run()["a", 0].token_ids == expected(range(20), 3)
    assert not following.events


def test_who_is_called_by_a_step_cannot_reset(bench: Make, dict_cache: Any) -> None:
    class Meddling(Following):
        def observe(self, event: Event) -> None:
            with pytest.raises(EngineError, match="reset_prefix_cache was called while"):
                engine.core.reset_prefix_cache()
            self.told.append(type(event))

    meddling = Meddling()
    engine = bench(cache=dict_cache, observers=(meddling,))
    engine.add("a", range(20), max_tokens=3)
    engine.run()
    assert BlocksNamed in meddling.told


def test_a_closed_engine_is_not_reset(bench: Make, dict_cache: Any) -> None:
    engine = bench(cache=dict_cache)
    engine.core.close()
    with pytest.raises(EngineError, match="closed"):
        engine.core.reset_prefix_cache()


def test_a_name_that_moves_to_another_block_is_no_news() -> None:
    known = KnownBlocks(1, is_heard=True)

    def hand_out(block: int) -> None:
        known.hand_out(Growth((((0, block),),), ((),)))

    def name(block: int) -> None:
        known.fill(0, [block], [b"x" * 16])
        known.cache(0, block)

    name(1)
    assert known.take_news() == BlocksNamed(1, stored=((0, b"x" * 16),))
    hand_out(1)
    name(2)
    assert known.take_news() is None
    hand_out(1)
    assert known.take_news() is None
    name(3)
    hand_out(2)
    assert known.take_news() is None, "the other block has the name still"
    hand_out(3)
    assert known.take_news() == BlocksNamed(2, evicted=((0, b"x" * 16),))


def test_nothing_is_collected_for_nobody() -> None:
    known = KnownBlocks(1, is_heard=False)
    known.fill(0, [1], [b"x" * 16])
    known.cache(0, 1)
    assert known.uncache_all() == [(0, 1)]
    assert known.take_news() is None
