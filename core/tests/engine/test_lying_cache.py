"""A prefix cache that is wrong can cost time, never a token, a block or the engine's going on: the engine
checks what it says, and does without it for a while."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pegboard.engine import breaker as breaker_module
from pegboard.interfaces.observer import BreakerChanged, ErrorHappened, Event, Observer
from pegboard.interfaces.prefix_cache import Hit, Prefix
from pegboard.testing.erring_drafter import Panic

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]
Lie = Callable[[type], type]

METHODS = ("match", "use", "publish", "evict", "clear")


class Listening(Observer):
    def __init__(self) -> None:
        self.errors: list[ErrorHappened] = []
        self.changes: list[BreakerChanged] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, ErrorHappened):
            self.errors.append(event)
        if isinstance(event, BreakerChanged):
            self.changes.append(event)

    def close(self) -> None:
        pass


def instead(method: str, answer: Callable[..., Any]) -> Lie:
    """A cache of which one method is another: `answer(cache, true answer, *arguments)`."""

    def lie(base: type) -> type:
        def lying(self: Any, *arguments: Any) -> Any:
            return answer(self, getattr(base, method)(self, *arguments), *arguments)

        return type("Lying", (base,), {method: lying})

    return lie


def _any_blocks(cache: Any, _: Hit, prefix: Prefix, limit: int) -> Hit:
    chance = random.Random(len(prefix.token_ids))
    count = limit // cache.stride
    blocks = tuple([chance.randrange(1, 20) for _ in range(count)] for _ in cache.sizes)
    return Hit(count * cache.stride, blocks)


def _other_length(cache: Any, hit: Hit, prefix: Prefix, limit: int) -> Hit:
    return Hit(hit.num_tokens + 1, hit.blocks) if hit.num_tokens else hit


def _one_block_more(cache: Any, hit: Hit, prefix: Prefix, limit: int) -> Hit:
    """Names the next block before anything is in it."""
    if not hit.num_tokens or hit.num_tokens + cache.stride > limit:
        return hit
    blocks = tuple([*ids, ids[-1] + 1] for ids in hit.blocks)
    return Hit(hit.num_tokens + cache.stride, blocks)


def _beyond_the_limit(cache: Any, hit: Hit, prefix: Prefix, limit: int) -> Hit:
    return Hit(limit + cache.stride, tuple([1] * (limit // 4 + 1) for _ in cache.sizes))


def _mixes_up_salts(base: type) -> type:
    class Lying(base):  # type: ignore[misc]
        def match(self, prefix: Prefix, limit: int) -> Hit:
            hit: Hit = super().match(Prefix(prefix.token_ids, "a"), limit)
            return hit

    return Lying


def _keeps_names_of_evicted_blocks(base: type) -> type:
    class Lying(base):  # type: ignore[misc]
        def evict(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> list[int]:
            kept = dict(self.names[group])
            victims: list[int] = super().evict(group, num_blocks, evictable)
            self.names[group] = kept
            return victims

    return Lying


def _blocks_of_others(cache: Any, new: Any, prefix: Prefix, blocks: Any) -> Any:
    return [*new, (0, 63), (0, 0)]


def _all_blocks_again(cache: Any, new: Any, prefix: Prefix, blocks: Any) -> Any:
    return [(group, block) for group, ids in enumerate(blocks) for block in ids if block]


def _raises(cache: Any, answer: Any, *arguments: Any) -> Any:
    raise ZeroDivisionError("not today")


def _exits(cache: Any, answer: Any, *arguments: Any) -> Any:
    raise SystemExit(1)


def _panics(cache: Any, answer: Any, *arguments: Any) -> Any:
    raise Panic


class Panicking:
    """No number, and worse."""

    def __index__(self) -> int:
        raise Panic

    def __repr__(self) -> str:
        raise Panic


JUNK: tuple[object, ...] = (None, 3, "blocks", [(1.5, 2)], iter([(0, 1)]))

LIES: dict[str, Lie] = {
    "claims any blocks": instead("match", _any_blocks),
    "claims other lengths": instead("match", _other_length),
    "claims what is not written yet": instead("match", _one_block_more),
    "claims beyond the limit": instead("match", _beyond_the_limit),
    "mixes up salts": _mixes_up_salts,
    "keeps names of evicted blocks": _keeps_names_of_evicted_blocks,
    "references blocks it was not given": instead("publish", _blocks_of_others),
    "references blocks again and again": instead("publish", _all_blocks_again),
    "references a group that is none": instead("publish", lambda *_: [(7, 1), (-1, 1)]),
    "evicts a block twice": instead("evict", lambda cache, blocks, *_: [*blocks, *blocks]),
    "evicts more than was asked": instead(
        "evict", lambda cache, blocks, group, *_: [*blocks, *cache.names[group].values()]
    ),
    "evicts blocks of running sequences": instead(
        "evict",
        lambda cache, blocks, group, num_blocks, evictable: [
            block for block in range(1, 40) if not evictable(block)
        ][:num_blocks],
    ),
    "evicts the block of nobody": instead("evict", lambda *_: [0]),
    "evicts blocks that are none": instead("evict", lambda *_: [-1]),
    "evicts blocks past the last": instead("evict", lambda *_: [10**9]),
    "evicts nothing": instead("evict", lambda *_: []),
    "evicts one at a time": instead("evict", lambda cache, blocks, *_: blocks[:1]),
    **{f"{method} raises": instead(method, _raises) for method in METHODS},
    **{f"{method} exits": instead(method, _exits) for method in METHODS},
    **{f"{method} panics": instead(method, _panics) for method in METHODS},
    "answers what panics": instead("evict", lambda *_: [Panicking()]),
    **{
        f"{method} answers a {type(answer).__name__}": instead(
            method, lambda *_, answer=answer: answer
        )
        for method in ("match", "publish", "evict")
        for answer in JUNK
    },
    "hits of anything": instead("match", lambda *_: Hit(4, (["a"],))),  # type: ignore[list-item]
    "hits of no groups": instead("match", lambda *_: Hit(4, ())),
    "hits of no length": instead("match", lambda *_: Hit(None, ())),  # type: ignore[arg-type]
}

TRUE_OR_NEVER_ASKED = ("evicts one at a time", "clear raises", "clear exits")
"""No lies, or lies that only a cache tells which is cut off already."""


def serve_in_rounds(engine: Any, expected: Expected, **params: Any) -> None:
    """Requests that share beginnings, in a pool that is too small for all of them."""
    prompts = {
        f"{turn}{index}": [index % 3] * (9 + turn) + list(range(turn % 2 * 7, turn % 2 * 7 + 9))
        for turn in range(4)
        for index in range(6)
    }
    for number, (name, prompt) in enumerate(prompts.items()):
        engine.add(name, prompt, max_tokens=12, cache_salt="ab"[number % 2], **params)
        if number % 6 == 5:
            engine.run()
    outputs = engine.run()
    for name, prompt in prompts.items():
        for index in range(params.get("n", 1)):
            assert outputs[name, index].token_ids == expected(prompt, 12, index=index), name


def assert_every_block_comes_back(engine: Any) -> None:
    for ledger in engine.core.ledger():
        assert ledger.free + ledger.cached == ledger.total
    engine.core.reset_prefix_cache()
    for ledger in engine.core.ledger():
        assert ledger.free == ledger.total


@pytest.mark.parametrize("pause_s", [0.0, 300.0], ids=["tried again at once", "cut off"])
@pytest.mark.parametrize("lie", LIES)
def test_no_lie_changes_a_token_or_costs_a_block(
    bench: Make,
    dict_cache: Any,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    lie: str,
    pause_s: float,
) -> None:
    monkeypatch.setattr(breaker_module, "FIRST_PAUSE_S", pause_s)
    listening = Listening()
    engine = bench(cache=LIES[lie](dict_cache), num_blocks=40, observers=(listening,))
    serve_in_rounds(engine, expected)
    assert_every_block_comes_back(engine)
    if lie not in TRUE_OR_NEVER_ASKED:
        assert listening.errors, "the lie was never told"
        assert "prefix_cache 'Lying' is cut off" in listening.errors[0].message
    if pause_s and lie not in TRUE_OR_NEVER_ASKED:
        assert [change.is_open for change in listening.changes] == [True]
        assert [cut_off.part for cut_off in engine.core.cut_off] == ["prefix_cache"]


@pytest.mark.parametrize("lie", ["evicts nothing", "evicts a block twice", "publish raises"])
def test_lies_cost_no_block_of_a_window_or_a_draft(
    bench: Make, dict_cache: Any, expected: Expected, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    monkeypatch.setattr(breaker_module, "FIRST_PAUSE_S", 0.0)
    engine = bench(
        cache=LIES[lie](dict_cache),
        block_sizes=(4, 4),
        windows=(None, 8),
        num_blocks=(40, 30),
        max_num_batched_tokens=8,
        num_speculative_tokens=3,
    )
    serve_in_rounds(engine, expected, n=2)
    assert_every_block_comes_back(engine)


@pytest.mark.parametrize(
    "layout",
    [
        {"num_blocks": 40},
        {"block_sizes": (4, 8), "windows": (None, None), "num_blocks": (60, 40)},
        {"block_sizes": (4, 4), "windows": (None, 8), "num_blocks": (40, 40)},
    ],
    ids=["one group", "two block sizes", "a window"],
)
def test_a_true_cache_is_never_cut_off(
    bench: Make, dict_cache: Any, expected: Expected, layout: dict[str, Any]
) -> None:
    listening = Listening()
    engine = bench(cache=dict_cache, observers=(listening,), **layout)
    serve_in_rounds(engine, expected)
    assert not listening.errors and not listening.changes
    assert_every_block_comes_back(engine)
    assert not engine.core.cut_off


class Moody:
    """Chooses at random, at each call, whether to answer truly, falsely, or not at all."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def __call__(self, base: type) -> type:
        def moody(method: str) -> Callable[..., Any]:
            def answer(cache: Any, *arguments: Any) -> Any:
                truth = getattr(base, method)(cache, *arguments)
                lies = [lie for name, lie in CALLS if name == method]
                if lies and self.chance.random() < 0.3:
                    return self.chance.choice(lies)(cache, truth, *arguments)
                return truth

            return answer

        return type("Lying", (base,), {method: moody(method) for method in METHODS})


CALLS: list[tuple[str, Callable[..., Any]]] = [
    ("match", _any_blocks),
    ("match", _other_length),
    ("match", _one_block_more),
    ("publish", _blocks_of_others),
    ("publish", _all_blocks_again),
    ("publish", lambda *_: []),
    ("evict", lambda cache, blocks, *_: [*blocks, *blocks]),
    ("evict", lambda *_: []),
    ("evict", lambda cache, blocks, *_: blocks[:1]),
    *((method, _raises) for method in METHODS),
]


@pytest.mark.parametrize("seed", range(12))
def test_no_mixture_of_lies_does(
    bench: Make, dict_cache: Any, expected: Expected, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(breaker_module, "FIRST_PAUSE_S", chance.choice([0.0, 0.001, 0.02]))
    monkeypatch.setattr(breaker_module, "MAX_PAUSE_S", 0.02)
    engine = bench(
        cache=Moody(chance)(dict_cache),
        num_blocks=chance.randrange(30, 60),
        max_num_batched_tokens=chance.choice([8, 32, 64]),
    )
    serve_in_rounds(engine, expected)
    assert_every_block_comes_back(engine)


@pytest.mark.timing
def test_a_slow_cache_is_cut_off_and_the_scheduler_is_not(
    bench: Make, dict_cache: Any, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(cache: Any, answer: Any, *arguments: Any) -> Any:
        time.sleep(0.5)
        return answer

    monkeypatch.setattr(breaker_module, "MAX_CALL_S", 0.3)
    engine = bench(cache=instead("match", sleep)(dict_cache))
    engine.add("a", range(1, 20), max_tokens=3)
    assert engine.run()["a", 0].token_ids == expected(range(1, 20), 3)
    (cut_off,) = engine.core.cut_off
    assert cut_off.part == "prefix_cache" and "s; allowed: 0.3" in cut_off.reason


def test_a_cache_that_mends_its_ways_serves_again(
    bench: Make, dict_cache: Any, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stumbling(dict_cache):  # type: ignore[misc]
        num_stumbles = 1

        def publish(self, prefix: Prefix, blocks: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
            new: list[tuple[int, int]] = super().publish(prefix, blocks)
            if self.num_stumbles:
                self.num_stumbles -= 1
                raise ValueError("oops")
            return new

    monkeypatch.setattr(breaker_module, "FIRST_PAUSE_S", 0.0)
    listening = Listening()
    engine = bench(cache=Stumbling, observers=(listening,))
    for turn in range(3):
        engine.add(f"{turn}", range(1, 20), max_tokens=5)
        assert engine.run()[f"{turn}", 0].token_ids == expected(range(1, 20), 5)
    assert [change.is_open for change in listening.changes] == [True, False]
    assert engine.outputs["2", 0].last.num_cached_tokens == 16
    assert_every_block_comes_back(engine)
