"""Reported hangs, livelocks and lost turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.interfaces.scheduler import Scheduler, SchedulerContext

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]
Preempting = Callable[[list[int]], Callable[[SchedulerContext], Scheduler]]

PROMPT = list(range(1, 31))


def test_two_that_begin_with_hits_do_not_keep_each_other_from_the_rest(
    bench: Make, expected: Expected, dict_cache: Any
) -> None:
    """Sixteen blocks: five of each hit, and either of them needs fifteen in the end."""
    engine = bench(cache=dict_cache, num_blocks=17, max_num_batched_tokens=8)
    prompts = {name: [start + i for i in range(20)] for name, start in (("a", 0), ("b", 40))}
    for name, prompt in prompts.items():
        engine.add(f"warm {name}", [*prompt, 1], max_tokens=1)
        engine.run()
    for name, prompt in prompts.items():
        engine.add(name, [*prompt, *range(15)], max_tokens=25)
    outputs = engine.run()
    for name, prompt in prompts.items():
        assert outputs[name, 0].token_ids == expected([*prompt, *range(15)], 25)
    assert outputs["a", 0].last.num_cached_tokens == 20


def test_a_window_pool_for_one_serves_many(bench: Make, expected: Expected) -> None:
    """A window of five and a step of four need eight tokens, in three blocks at most."""
    engine = bench(windows=(5,), num_blocks=4, max_num_batched_tokens=4, max_num_seqs=4)
    for name in "abcd":
        engine.add(name, PROMPT, max_tokens=20)
    outputs = engine.run()
    assert all(outputs[name, 0].token_ids == expected(PROMPT, 20) for name in "abcd")


def test_a_prompt_of_more_than_32k_is_admitted(bench: Make, expected: Expected) -> None:
    engine = bench(
        block_sizes=(64, 16),
        windows=(None, 100),
        num_blocks=(600, 700),
        max_model_len=36_000,
        max_num_batched_tokens=8192,
    )
    prompt = [number % 97 for number in range(33_000)]
    engine.add("long", prompt, max_tokens=2)
    engine.add("short", [1, 2], max_tokens=2)
    outputs = engine.run()
    assert outputs["long", 0].token_ids == expected(prompt, 2)
    assert outputs["short", 0].token_ids == expected([1, 2], 2)


def test_one_that_cannot_go_on_fails_alone_with_the_numbers(
    bench: Make, expected: Expected
) -> None:
    engine = bench(num_blocks=13)
    engine.add("lends", PROMPT, max_tokens=2)
    engine.step()
    engine.allocator.pin("transfer", 1, deadline=0.0)
    engine.run()
    assert engine.core.ledger()[0].pinned == 8
    engine.add("grows", [1, 2, 3], max_tokens=30)
    error = engine.run()["grows", 0].last.error
    assert error is not None and "pinned=8" in error and "total=12" in error
    assert engine.outputs["grows", 0].token_ids == expected([1, 2, 3], 14)
    engine.add("fits", [1, 2, 3], max_tokens=10)
    assert engine.run()["fits", 0].token_ids == expected([1, 2, 3], 10)
    engine.allocator.unpin("transfer")
    engine.add("again", [1, 2, 3], max_tokens=30)
    assert engine.run()["again", 0].token_ids == expected([1, 2, 3], 30)


def test_after_a_preemption_each_step_brings_everybody_a_token(
    bench: Make, preempting: Preempting
) -> None:
    engine = bench(scheduler=preempting([-1] * 10 + [2, 1]))
    for name in "abc":
        engine.add(name, PROMPT[:8], max_tokens=40)
    for _ in range(13):
        engine.step()
    assert engine.core.num_running == 3
    for _ in range(20):
        assert {delta.request_id for delta in engine.step()} == set("abc")


@pytest.mark.parametrize("depth", [1])
def test_a_preempted_sequence_keeps_its_place(bench: Make, preempting: Preempting) -> None:
    engine = bench(max_num_seqs=2, scheduler=preempting([-1, -1, -1, 1]))
    for name in "abcd":
        engine.add(name, [ord(name) - 90, 2], max_tokens=9)
    while engine.core.has_work():
        engine.step()
    admitted = [row.token_ids[0] for batch in engine.worker.batches for row in batch.admitted]
    a, b, c, d = (ord(name) - 90 for name in "abcd")
    assert admitted == [a, b, b, c, d]
