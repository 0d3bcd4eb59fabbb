"""Several sequences of a request: the prompt is computed once, whatever else happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.builtin.fcfs import FCFS
from pegboard.interfaces.observer import Event, Observer, StepDone
from pegboard.interfaces.scheduler import QueueView, SchedulerContext, StepBuilder

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]

PROMPT = list(range(1, 31))


class Interrupted(FCFS):
    """Preempts all but the oldest in some steps."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self._num_plans = 0

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        self._num_plans += 1
        if self._num_plans % 4 == 0:
            for seq in queue.running:
                step.preempt(seq)
        super().plan(queue, step)


def _num_computed(engine: Any) -> int:
    return sum(int(batch.num_tokens.sum()) for batch in engine.worker.batches)


def _num_copies(engine: Any) -> int:
    return sum(len(update.copy_from) for batch in engine.worker.batches for update in batch.groups)


def _check(engine: Any, expected: Expected, n: int, max_tokens: int) -> None:
    outputs = engine.run()
    for index in range(n):
        tokens = expected(PROMPT, max_tokens, 0, index)
        assert outputs["a", index].token_ids == tokens, outputs["a", index].last.error


@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("block_size", [1, 4, 16, 29])
def test_a_prompt_is_computed_once_without_any_cache(
    bench: Make, expected: Expected, block_size: int, budget: int
) -> None:
    engine = bench(block_sizes=(block_size,), max_num_batched_tokens=budget, num_blocks=129)
    engine.add("a", PROMPT, n=3, max_tokens=5)
    _check(engine, expected, 3, 5)
    # 30 prompt tokens, the last of them once more for each of the others, 4 outputs each.
    assert _num_computed(engine) == 30 + 2 + 3 * 4
    # Where the last token but one ends a block there is nothing to copy.
    assert _num_copies(engine) == (0 if 29 % block_size == 0 else 2)
    assert [engine.outputs["a", i].last.num_cached_tokens for i in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("values", [{}, {"num_speculative_tokens": 4}, {"max_num_seqs": 2}])
@pytest.mark.parametrize("scheduler", [FCFS, Interrupted])
@pytest.mark.parametrize("windows", [(None,), (6,), (None, 5), (3, 7)])
def test_forks_hold_what_the_prompt_was(
    bench: Make, expected: Expected, windows: Any, scheduler: Any, values: dict[str, Any]
) -> None:
    engine = bench(
        windows=windows,
        block_sizes=(4, 2)[: len(windows)],
        scheduler=scheduler,
        num_blocks=40,
        max_num_batched_tokens=24,
        **values,
    )
    engine.add("a", PROMPT, n=4, max_tokens=9)
    _check(engine, expected, 4, 9)


def test_a_fork_outlives_its_siblings(bench: Make, expected: Expected) -> None:
    first = expected(PROMPT, 3, 0, 0)
    engine = bench(max_num_seqs=2)
    engine.add("a", PROMPT, n=3, max_tokens=20, stop_token_ids=(first[2],))
    outputs = engine.run()
    for index in range(3):
        tokens = expected(PROMPT, 20, 0, index)
        end = tokens.index(first[2]) + 1 if first[2] in tokens else 20
        assert outputs["a", index].token_ids == tokens[:end]


@pytest.mark.parametrize("num_steps", range(6))
def test_aborted_siblings_leave_nothing_behind(
    bench: Make, expected: Expected, num_steps: int
) -> None:
    engine = bench(max_num_batched_tokens=12)
    engine.add("gone", PROMPT, n=4, max_tokens=20)
    engine.add("stays", PROMPT[:5], max_tokens=9)
    for _ in range(num_steps):
        engine.step()
    engine.core.abort("gone")
    assert engine.run()["stays", 0].token_ids == expected(PROMPT[:5], 9)
    assert engine.core.ledger()[0].free == 64


def test_logprobs_of_the_prompt_are_computed_and_handed_out_once(
    bench: Make, expected: Expected
) -> None:
    engine = bench()
    engine.add("a", PROMPT, n=40, max_tokens=3, prompt_logprobs=0)
    _check(engine, expected, 40, 3)
    assert _num_computed(engine) == 30 + 2 + 39 * (1 + 2)
    deltas = [delta for output in engine.outputs.values() for delta in output.deltas]
    (values,) = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs]
    assert values == engine.outputs["a", 0].deltas[0].prompt_logprobs
    assert [value and value.token_id for value in values] == [None, *PROMPT[1:]]


@pytest.mark.parametrize("depth", [1])
def test_nothing_is_forked_from_one_that_was_preempted_in_this_plan(
    bench: Make, expected: Expected
) -> None:
    class Exchanging(FCFS):
        """Preempts the first of the siblings in the second step, and lets the next one begin."""

        def plan(self, queue: QueueView, step: StepBuilder) -> None:
            if len(queue.running) == 2 and queue.running[1].num_output == 1:
                assert step.num_cached(queue.waiting[0]) == 29
                assert step.preempt(queue.running[1])
                assert step.num_cached(queue.waiting[0]) == 0
                assert not step.waits_for_prefix(queue.waiting[0])
                assert step.add(queue.waiting[0], 30)
            super().plan(queue, step)

    engine = bench(windows=(6,), scheduler=Exchanging, max_num_seqs=3)
    engine.add("oldest", [1], max_tokens=20)
    engine.add("a", PROMPT, n=2, max_tokens=5)
    _check(engine, expected, 2, 5)
    assert engine.worker.batches[1].num_tokens.tolist() == [30, 1]
    assert not engine.core.cut_off


@pytest.mark.parametrize("depth", [1])
def test_a_preempted_fork_begins_again_as_a_fork(bench: Make, expected: Expected) -> None:
    class Once(FCFS):
        def plan(self, queue: QueueView, step: StepBuilder) -> None:
            if len(queue.running) == 2 and queue.running[1].num_output == 3:
                assert step.preempt(queue.running[1])
            super().plan(queue, step)

    engine = bench(scheduler=Once)
    engine.add("a", PROMPT, n=2, max_tokens=8)
    _check(engine, expected, 2, 8)
    # The last prompt token and three outputs of the fork are computed twice.
    assert _num_computed(engine) == 30 + 1 + 2 * 7 + (1 + 2)


class Counting(Observer):
    def __init__(self) -> None:
        self.num_queries = self.num_hits = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.num_queries += event.num_prefix_queries
            self.num_hits += event.num_prefix_hits

    def close(self) -> None: ...


def test_forks_are_no_hits(bench: Make, dict_cache: Any) -> None:
    counting = Counting()
    engine = bench(cache=dict_cache, observers=(counting,))
    for name in "ab":
        engine.add(name, PROMPT, n=3, max_tokens=4)
        engine.run()
    assert (counting.num_queries, counting.num_hits) == (60, 28)
    assert [engine.outputs["b", i].last.num_cached_tokens for i in range(3)] == [28, 0, 0]
