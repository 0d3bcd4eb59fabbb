"""A prefix cache that is wrong can cost time, never a token: the engine checks what it says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pegboard.interfaces.observer import ErrorHappened, Event, Observer
from pegboard.interfaces.prefix_cache import Hit, Prefix

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]


class Listening(Observer):
    def __init__(self) -> None:
        self.mistakes: list[str] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, ErrorHappened) and event.kind == "PrefixCacheMistake":
            self.mistakes.append(event.message)

    def close(self) -> None:
        pass


def claims_any_pages(base: type) -> type:
    """Hits of pages that hold other tokens, or nothing."""

    class Cache(base):  # type: ignore[misc]
        def match(self, prefix: Prefix, limit: int) -> Hit:
            chance = random.Random(len(prefix.token_ids))
            count = limit // self.stride
            pages = tuple([chance.randrange(1, 20) for _ in range(count)] for _ in self.sizes)
            return Hit(count * self.stride, pages)

    return Cache


def claims_other_lengths(base: type) -> type:
    """True hits, with a number of tokens that does not fit the pages."""

    class Cache(base):  # type: ignore[misc]
        def match(self, prefix: Prefix, limit: int) -> Hit:
            hit: Hit = super().match(prefix, limit)
            return Hit(hit.num_tokens + 1, hit.pages) if hit.num_tokens else hit

    return Cache


def mixes_up_tenants(base: type) -> type:
    """Forgets whose tokens they are."""

    class Cache(base):  # type: ignore[misc]
        def match(self, prefix: Prefix, limit: int) -> Hit:
            hit: Hit = super().match(Prefix(prefix.token_ids, "a"), limit)
            return hit

    return Cache


def keeps_names_of_evicted_pages(base: type) -> type:
    """Goes on naming pages that it has given back."""

    class Cache(base):  # type: ignore[misc]
        def evict(self, group: int, num_pages: int, evictable: Callable[[int], bool]) -> list[int]:
            kept = dict(self.names[group])
            victims: list[int] = super().evict(group, num_pages, evictable)
            self.names[group] = kept
            return victims

    return Cache


def references_pages_it_was_not_given(base: type) -> type:
    class Cache(base):  # type: ignore[misc]
        def publish(self, prefix: Prefix, pages: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
            return [*super().publish(prefix, pages), (0, 63), (0, 0)]

    return Cache


LIES = [
    claims_any_pages,
    claims_other_lengths,
    mixes_up_tenants,
    keeps_names_of_evicted_pages,
    references_pages_it_was_not_given,
]


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_changes_a_token(
    bench: Make, dict_cache: Any, expected: Expected, lie: Callable[[type], type]
) -> None:
    listening = Listening()
    engine = bench(cache=lie(dict_cache), num_blocks=40, observers=(listening,))
    prompts = {
        f"{turn}{index}": [index % 3] * (9 + turn) + list(range(turn % 2 * 7, turn % 2 * 7 + 9))
        for turn in range(6)
        for index in range(6)
    }
    for number, (name, prompt) in enumerate(prompts.items()):
        engine.add(name, prompt, max_tokens=12, tenant="ab"[number % 2])
        if number % 6 == 5:
            engine.run()
    outputs = engine.run()
    for name, prompt in prompts.items():
        assert outputs[name, 0].token_ids == expected(prompt, 12), name
    assert listening.mistakes, "the lie was never told"
