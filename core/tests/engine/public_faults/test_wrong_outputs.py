"""Reported wrong outputs and wrong counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.interfaces.observer import Event, Observer, StepDone
from pegboard.interfaces.scheduler import Scheduler, SchedulerContext

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]
Preempting = Callable[[list[int]], Callable[[SchedulerContext], Scheduler]]
AllFree = Callable[[Any], bool]

PROMPT = list(range(1, 31))


def test_a_prompt_preempted_half_way_poisons_no_prefix(
    bench: Make, expected: Expected, dict_cache: Any, preempting: Preempting, all_free: AllFree
) -> None:
    """Its blocks are named as they are filled, given back, and found by itself and by others."""
    prompt = list(range(50))
    engine = bench(
        cache=dict_cache,
        scheduler=preempting([-1, -1, 1, -1, 1]),
        num_blocks=22,
        max_num_batched_tokens=10,
    )
    engine.add("first", [90], max_tokens=20)
    engine.add("half way", prompt, max_tokens=4)
    for _ in range(3):
        engine.step()
    named = [len(tokens) for _, tokens in engine.cache.names[0]]
    assert 0 < max(named) < 50
    engine.add("twin", prompt, max_tokens=4)
    engine.add("fills", [80] * 40, max_tokens=20)
    engine.add("later", prompt, max_tokens=4)
    outputs = engine.run()
    for name in ("half way", "twin", "later"):
        assert outputs[name, 0].token_ids == expected(prompt, 4)
    assert outputs["twin", 0].last.num_cached_tokens > 0
    assert all_free(engine)


def test_pinned_blocks_of_a_preempted_sequence_stay(
    bench: Make, expected: Expected, preempting: Preempting
) -> None:
    engine = bench(scheduler=preempting([-1] * 5 + [1]), num_blocks=25)
    engine.add("first", [7], max_tokens=30)
    engine.add("victim", PROMPT, max_tokens=20)
    for _ in range(5):
        engine.step()
    (blocks,) = engine.allocator.pin("transfer", 2, deadline=0.0)
    pinned = {key: value for key, value in engine.worker.kv[0].items() if key[0] in blocks}
    assert len(pinned) == 30 + 4
    engine.step()
    engine.add("takes what is free", [80] * 10, max_tokens=3)
    outputs = engine.run()
    assert outputs["victim", 0].token_ids == expected(PROMPT, 20)
    assert pinned.items() <= engine.worker.kv[0].items()


@pytest.mark.parametrize("windows", [(None,), (3,), (None, 3)])
def test_slots_for_drafts_cost_no_block_that_is_needed(
    bench: Make, expected: Expected, windows: tuple[int | None, ...]
) -> None:
    for length in range(1, 10):
        engine = bench(
            block_sizes=(4, 2)[: len(windows)], windows=windows, num_speculative_tokens=4
        )
        engine.add("a", PROMPT[:length], max_tokens=17)
        engine.add("b", PROMPT[1 : length + 1], max_tokens=17, n=2)
        outputs = engine.run()
        assert outputs["a", 0].token_ids == expected(PROMPT[:length], 17)
        for index in range(2):
            tokens = expected(PROMPT[1 : length + 1], 17, 0, index)
            assert outputs["b", index].token_ids == tokens


class Hits(Observer):
    """Prompt tokens that were looked up, and found."""

    def __init__(self) -> None:
        self.num_looked_up = self.num_found = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.num_looked_up += event.num_prefix_queries
            self.num_found += event.num_prefix_hits

    def close(self) -> None:
        pass


def test_windows_and_drafts_have_hits_and_say_so(
    bench: Make, expected: Expected, dict_cache: Any
) -> None:
    hits = Hits()
    engine = bench(
        cache=dict_cache,
        block_sizes=(4, 2),
        windows=(None, 6),
        num_speculative_tokens=3,
        observers=(hits,),
    )
    for number in range(3):
        engine.add(str(number), PROMPT, max_tokens=8, seed=number)
        assert engine.run()[str(number), 0].token_ids == expected(PROMPT, 8, number)
    assert (hits.num_looked_up, hits.num_found) == (3 * 30, 2 * 28)
