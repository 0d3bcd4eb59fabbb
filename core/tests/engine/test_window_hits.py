"""Hits on a model with windows: what lies before the window is not held, so it fits as without a hit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.interfaces.prefix_cache import Hit, Prefix

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]


@pytest.mark.parametrize(
    ("windows", "num_blocks"), [((4,), 24), ((2,), 23), ((None, 4), (70, 24)), ((9, 4), (40, 24))]
)
def test_a_long_hit_fits_a_pool_that_holds_a_window(
    bench: Make, dict_cache: Any, expected: Expected, windows: Any, num_blocks: Any
) -> None:
    """With one token a block, a hit of 40 tokens names more blocks than a window group has."""

    class Cache(dict_cache):  # type: ignore[misc]
        def match(self, prefix: Prefix, limit: int) -> Hit:
            """Blocks before the window need not be known."""
            tokens = tuple(prefix.token_ids.tolist())
            for num_tokens in range(limit, 0, -1):
                blocks = [
                    [names.get((prefix.salt, tokens[:end]), 0) for end in range(1, num_tokens + 1)]
                    for names in self.names
                ]
                seen = [num_tokens if window is None else window - 1 for window in windows]
                if all(
                    all(group[num_tokens - n if n else num_tokens :])
                    for group, n in zip(blocks, seen, strict=True)
                ):
                    return Hit(num_tokens, tuple(blocks))
            return Hit(0, tuple(() for _ in self.names))

        def evict(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> list[int]:
            """Beginnings first: a window needs none."""
            names = self.names[group]
            keys = sorted(names, key=lambda key: len(key[1]))
            victims = [key for key in keys if evictable(names[key])][:num_blocks]
            return [names.pop(key) for key in victims]

    engine = bench(
        cache=Cache,
        block_sizes=(1,) * len(windows),
        windows=windows,
        num_blocks=num_blocks,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        max_model_len=64,
    )
    first, second = list(range(1, 42)), [*range(1, 41), *range(60, 70)]
    engine.add("first", first, max_tokens=1)
    assert engine.run()["first", 0].token_ids == expected(first, 1)
    engine.add("second", second, max_tokens=6)
    output = engine.run()["second", 0]
    assert output.token_ids == expected(second, 6), output.last.error
    assert output.last.num_cached_tokens == 40


def test_a_hit_that_cannot_be_grown_is_a_miss(
    bench: Make, dict_cache: Any, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench(cache=dict_cache, max_num_seqs=2)
    prompt = list(range(1, 30))
    engine.add("first", prompt, max_tokens=3)
    engine.run()
    grow, adopted = engine.allocator.grow, set()

    def adopt(owner: int, blocks: Any) -> None:
        adopted.add(owner)
        type(engine.allocator).adopt(engine.allocator, owner, blocks)

    def release(owner: int, after_step: int | None = None) -> None:
        adopted.discard(owner)
        type(engine.allocator).release(engine.allocator, owner, after_step)

    monkeypatch.setattr(engine.allocator, "adopt", adopt)
    monkeypatch.setattr(engine.allocator, "release", release)
    monkeypatch.setattr(
        engine.allocator,
        "grow",
        lambda owner, *demand: None if owner in adopted else grow(owner, *demand),
    )
    for name in ("second", "third"):
        engine.add(name, prompt, max_tokens=5)
    outputs = engine.run()
    for name in ("second", "third"):
        assert outputs[name, 0].token_ids == expected(prompt, 5), outputs[name, 0].last.error
        assert outputs[name, 0].last.num_cached_tokens == 0
