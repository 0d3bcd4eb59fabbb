"""Requests that come together and begin alike: one computes the beginning, the others wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.engine.prefix.coming_prefixes import MIN_TOKENS
from pegboard.interfaces.scheduler import (
    MAX_PREFIX_SKIPS,
    QueueView,
    Scheduler,
    SchedulerContext,
    StepBuilder,
)

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]

COMMON = list(range(1, 41))


def _num_prefilled(engine: Any) -> int:
    """Tokens computed but for those that were generated."""
    num_computed = sum(int(batch.num_tokens.sum()) for batch in engine.worker.batches)
    return num_computed - sum(len(output.token_ids) - 1 for output in engine.outputs.values())


def _two(engine: Any, expected: Expected, **second: Any) -> int:
    """Two requests that come together; how much of their prompts was computed."""
    engine.add("a", [*COMMON, 50, 51], max_tokens=4)
    engine.add("b", [*COMMON, 60, 61, 62], max_tokens=4, **second)
    outputs = engine.run()
    assert outputs["a", 0].token_ids == expected([*COMMON, 50, 51], 4)
    assert outputs["b", 0].token_ids == expected([*COMMON, 60, 61, 62], 4)
    return _num_prefilled(engine)


@pytest.mark.parametrize("values", [{}, {"block_sizes": (4, 8), "windows": (None, None)}])
def test_a_common_beginning_is_computed_once(
    bench: Make, expected: Expected, dict_cache: Any, values: dict[str, Any]
) -> None:
    engine = bench(cache=dict_cache, max_num_batched_tokens=128, **values)
    assert _two(engine, expected) == 42 + 3
    assert engine.outputs["b", 0].last.num_cached_tokens == 40


@pytest.mark.parametrize("budget", [9, 16, 33])
def test_a_beginning_in_chunks_is_waited_for_while_much_is_missing(
    bench: Make, expected: Expected, dict_cache: Any, budget: int
) -> None:
    engine = bench(cache=dict_cache, max_num_batched_tokens=budget)
    prompt = list(range(90))
    for name in "ab":
        engine.add(name, prompt, max_tokens=4)
    outputs = engine.run()
    assert all(outputs[name, 0].token_ids == expected(prompt, 4) for name in "ab")
    assert 90 + 2 <= _num_prefilled(engine) < 90 + MIN_TOKENS


@pytest.mark.parametrize(
    ("cached", "second"),
    [
        (False, {}),
        (True, {"cache_salt": "another"}),
        (True, {"prefix_cache": "off"}),
        (True, {"prompt_logprobs": 0}),
    ],
)
def test_who_cannot_have_it_does_not_wait(
    bench: Make, expected: Expected, dict_cache: Any, cached: bool, second: dict[str, Any]
) -> None:
    values = {"cache": dict_cache} if cached else {}
    engine = bench(max_num_batched_tokens=128, **values)
    assert _two(engine, expected, **second) == 42 + 43
    assert len(engine.worker.batches[0].rows) == 2, "both begin at once"


def test_one_that_only_reads_waits_and_is_not_waited_for(
    bench: Make, expected: Expected, dict_cache: Any
) -> None:
    engine = bench(cache=dict_cache, max_num_batched_tokens=128)
    assert _two(engine, expected, prefix_cache="read_only") == 42 + 3
    engine = bench(cache=dict_cache, max_num_batched_tokens=128)
    engine.add("reads", COMMON, max_tokens=2, prefix_cache="read_only")
    engine.add("on", COMMON, max_tokens=2)
    engine.run()
    assert _num_prefilled(engine) == 80


def test_a_short_common_beginning_is_not_worth_a_wait(bench: Make, dict_cache: Any) -> None:
    engine = bench(cache=dict_cache, max_num_batched_tokens=128)
    engine.add("a", [*range(28), 50], max_tokens=2)
    engine.add("b", [*range(28), 60], max_tokens=2)
    engine.step()
    assert engine.worker.batches[0].num_tokens.tolist() == [29, 29]


def test_who_does_not_begin_alike_is_not_held_up(bench: Make, dict_cache: Any) -> None:
    engine = bench(cache=dict_cache, max_num_batched_tokens=128)
    engine.add("a", [*COMMON, 1], max_tokens=2)
    engine.add("b", [*COMMON, 2], max_tokens=2)
    engine.add("c", [9, *COMMON], max_tokens=2)
    engine.step()
    assert [row.tokens[0] for row in engine.worker.rows.values()] == [1, 9]
    engine.run()


@pytest.mark.parametrize("depth", [1])
def test_nobody_waits_for_one_that_ended_or_was_preempted(
    bench: Make, expected: Expected, dict_cache: Any
) -> None:
    engine = bench(cache=dict_cache, max_num_batched_tokens=16)
    engine.add("gone", [*COMMON, 1], max_tokens=2)
    engine.add("b", [*COMMON, 2], max_tokens=2)
    engine.step()
    assert engine.core.num_waiting == 1
    engine.core.abort("gone")
    assert engine.run()["b", 0].token_ids == expected([*COMMON, 2], 2)
    assert engine.outputs["b", 0].last.num_cached_tokens == 16


class Asking(Scheduler):
    """Admits one after the other, and notes what the step says of those that wait."""

    def __init__(self, context: SchedulerContext) -> None:
        self.answers: list[list[bool]] = []

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        for seq in queue.running:
            assert not step.waits_for_prefix(seq), "it runs"
            step.add(seq, min(10, seq.num_pending))
        before = [step.waits_for_prefix(seq) for seq in queue.waiting]
        admitted = queue.waiting[0] if queue.waiting else None
        if admitted is not None and not before[0]:
            step.add(admitted, 10)
            after = [step.waits_for_prefix(seq) for seq in queue.waiting]
            assert not after[0], "it is in the step"
            self.answers.append(after[1:])
            if len(self.answers) == 1:
                assert step.preempt(admitted) is False, "the oldest is protected"


def test_the_answer_is_no_longer_yes_once_the_beginning_is_known(
    bench: Make, expected: Expected, dict_cache: Any
) -> None:
    scheduler = Asking(SchedulerContext(1, 1, 1))
    engine = bench(cache=dict_cache, scheduler=lambda context: scheduler)
    for number in range(3):
        engine.add(str(number), [*COMMON, number], max_tokens=2)
    outputs = engine.run()
    # The first is waited for by both. The second and the third find it known.
    assert scheduler.answers == [[True, True], [False], []]
    assert len(engine.worker.batches) > 4
    for number in range(3):
        assert outputs[str(number), 0].token_ids == expected([*COMMON, number], 2)


def test_a_plan_looks_past_so_many_and_no_more(bench: Make, dict_cache: Any) -> None:
    engine = bench(cache=dict_cache, max_num_seqs=64, max_num_batched_tokens=256, num_blocks=1025)
    for number in range(MAX_PREFIX_SKIPS + 8):
        engine.add(str(number), [*COMMON, number % 7, number], max_tokens=2)
    engine.add("other", [90, 91], max_tokens=2)
    engine.step()
    assert len(engine.worker.batches[0].rows) == 1
    engine.run()
    assert _num_prefilled(engine) == 42 + (MAX_PREFIX_SKIPS + 7) * 2 + 2


def test_one_match_a_plan_is_enough(bench: Make, dict_cache: Any) -> None:
    class Counted(dict_cache):  # type: ignore[misc]
        num_matches = 0

        def match(self, *args: Any) -> Any:
            Counted.num_matches += 1
            return super().match(*args)

    class Curious(Scheduler):
        def __init__(self, context: SchedulerContext) -> None: ...

        def plan(self, queue: QueueView, step: StepBuilder) -> None:
            for seq in queue.running:
                step.add(seq, seq.num_pending)
            for seq in sorted(queue.waiting, key=lambda seq: -step.num_cached(seq)):
                if not step.waits_for_prefix(seq) and step.num_cached(seq) >= 0:
                    step.add(seq, seq.num_pending)

    engine = bench(cache=Counted, scheduler=Curious, max_num_seqs=2, max_num_batched_tokens=128)
    for number in range(5):
        engine.add(str(number), [number, *COMMON], max_tokens=8)
    engine.step()
    assert Counted.num_matches == 5
    Counted.num_matches = 0
    for _ in range(2):  # nobody's block is full again before the third step
        engine.step()
    assert Counted.num_matches == 3, "the three that wait, after new names"
    engine.run()
