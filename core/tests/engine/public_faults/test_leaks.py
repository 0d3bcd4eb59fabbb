"""Reported leaks, double frees and blocks of two owners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.builtin.fcfs import FCFS
from pegboard.interfaces.scheduler import QueueView, Scheduler, SchedulerContext, StepBuilder

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]
Preempting = Callable[[list[int]], Callable[[SchedulerContext], Scheduler]]
AllFree = Callable[[Any], bool]

PROMPT = list(range(1, 31))


def test_blocks_that_several_hold_are_counted_once(bench: Make, dict_cache: Any) -> None:
    engine = bench(cache=dict_cache)
    engine.add("first", PROMPT, max_tokens=1)
    engine.run()
    assert engine.core.ledger()[0].cached == 7
    for name in "ab":
        engine.add(name, PROMPT, max_tokens=2)
    engine.step()
    (ledger,) = engine.core.ledger()
    # Both have the seven blocks and one of their own; the cache's are theirs too.
    assert (ledger.held, ledger.cached, ledger.free) == (9, 0, 55)
    engine.run()
    (ledger,) = engine.core.ledger()
    assert (ledger.held, ledger.cached, ledger.free) == (0, 7, 57)


def test_an_end_within_a_verified_span_frees_each_block_once(
    bench: Make, expected: Expected
) -> None:
    tokens = expected(PROMPT, 20)
    for stop in tokens:
        engine = bench(num_speculative_tokens=6)
        engine.add("stops", PROMPT, max_tokens=20, stop_token_ids=(stop,))
        engine.add("aborted", PROMPT, max_tokens=20)
        engine.step()
        engine.step()
        engine.core.abort("aborted")
        outputs = engine.run()
        assert outputs["stops", 0].token_ids == tokens[: tokens.index(stop) + 1]
        assert engine.core.ledger()[0].free == 64


def test_blocks_that_left_a_window_serve_others(
    bench: Make, expected: Expected, preempting: Preempting
) -> None:
    engine = bench(
        block_sizes=(4, 1),
        windows=(None, 5),
        num_blocks=(65, 15),
        max_num_batched_tokens=5,
        scheduler=preempting([-1] * 12 + [1] + [-1] * 5 + [1]),
    )
    for name in "abc":
        engine.add(name, PROMPT, max_tokens=20)
    outputs = engine.run()
    for name in "abc":
        assert outputs[name, 0].token_ids == expected(PROMPT, 20)
    assert [ledger.free for ledger in engine.core.ledger()] == [64, 14]


class HalfWay(FCFS):
    """Admits what it can, and raises."""

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        super().plan(queue, step)
        raise RuntimeError("half way")


def test_a_plan_that_fails_half_way_holds_nothing(bench: Make, expected: Expected) -> None:
    class One(FCFS):
        def plan(self, queue: QueueView, step: StepBuilder) -> None:
            for seq in queue.running or queue.waiting[:1]:
                step.add(seq, seq.num_pending)

    only_one = One(SchedulerContext(8, 64, 128))
    engine = bench(scheduler=HalfWay, fallback_scheduler=only_one)
    for name in "ab":
        engine.add(name, PROMPT, max_tokens=3)
    engine.step()
    assert (engine.core.num_running, engine.core.ledger()[0].held) == (1, 8)
    outputs = engine.run()
    assert all(outputs[name, 0].token_ids == expected(PROMPT, 3) for name in "ab")


@pytest.mark.parametrize("block_size", [2, 4, 7, 16])
def test_a_preempted_hit_that_ends_within_a_block_leaks_nothing(
    bench: Make,
    expected: Expected,
    dict_cache: Any,
    block_size: int,
    preempting: Preempting,
    all_free: AllFree,
) -> None:
    victims = [-1] * 2 + [1, -1, -1] * 6
    engine = bench(
        block_sizes=(block_size,), cache=dict_cache, scheduler=preempting(victims), num_blocks=129
    )
    for number in range(4):
        engine.add(str(number), [*PROMPT[: 17 + number], 90 + number], max_tokens=9, n=2)
    outputs = engine.run()
    for number in range(4):
        prompt = [*PROMPT[: 17 + number], 90 + number]
        for index in range(2):
            assert outputs[str(number), index].token_ids == expected(prompt, 9, 0, index)
    assert all_free(engine)


class Impatient(Scheduler):
    """Lets everybody compute at once, whoever else computes the same."""

    def __init__(self, context: SchedulerContext) -> None: ...

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        for seq in (*queue.running, *queue.waiting):
            step.add(seq, seq.num_pending)


def test_the_block_that_has_the_name_is_the_one_that_is_kept(
    bench: Make, expected: Expected, dict_cache: Any, all_free: AllFree
) -> None:
    engine = bench(cache=dict_cache, scheduler=Impatient, num_blocks=33)
    engine.add("named", PROMPT, max_tokens=8)
    engine.add("twin", PROMPT, max_tokens=2)
    engine.step()
    assert engine.core.ledger()[0].held == 16, "each computed all of it"
    engine.run()
    # The twin ended first. Its blocks are used by others now; the named ones are not.
    assert engine.core.ledger()[0].cached == 9
    engine.add("other", [90, *PROMPT, *PROMPT], max_tokens=20)
    engine.run()
    engine.add("hits", PROMPT, max_tokens=3)
    output = engine.run()["hits", 0]
    assert (output.token_ids, output.last.num_cached_tokens) == (expected(PROMPT, 3), 28)
    assert all_free(engine)


@pytest.mark.parametrize("depth", [1])
def test_one_preempted_at_the_end_of_its_prompt_leaves_the_prompts_blocks(
    bench: Make, expected: Expected, dict_cache: Any, preempting: Preempting
) -> None:
    # Ten tokens a step beside the first one's: the victim's prompt would be done in the third.
    scheduler = preempting([-1, -1, 1])
    engine = bench(cache=dict_cache, scheduler=scheduler, max_num_batched_tokens=11)
    engine.add("first", [7], max_tokens=12)
    engine.add("victim", PROMPT, max_tokens=1)
    assert engine.run()["victim", 0].token_ids == expected(PROMPT, 1)
    admitted = [row.token_ids[0] for batch in engine.worker.batches for row in batch.admitted]
    assert admitted == [7, 1, 1]
    engine.add("next", PROMPT, max_tokens=2)
    output = engine.run()["next", 0]
    assert (output.token_ids, output.last.num_cached_tokens) == (expected(PROMPT, 2), 28)
