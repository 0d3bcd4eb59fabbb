"""The step's answers to all that a scheduler may ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pegboard.interfaces.scheduler import (
    QueueView,
    Scheduler,
    SchedulerContext,
    SequenceView,
    StepBuilder,
)

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]
Script = Callable[[QueueView, StepBuilder], object]


class Scripted(Scheduler):
    """Plans each step by the next function of a list; after that it computes all it can."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts: Iterator[Script] = iter(scripts)

    def __call__(self, context: SchedulerContext) -> Scripted:
        return self

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        script = next(self._scripts, None)
        if script is not None:
            script(queue, step)
            return
        for seq in (*queue.running, *queue.waiting):
            step.add(seq, seq.num_pending)


def _by_prompt(queue: QueueView) -> dict[int, SequenceView]:
    return {seq.num_prompt: seq for seq in (*queue.running, *queue.waiting)}


def test_requests_for_tokens_are_cut_and_second_entries_refused(bench: Make) -> None:
    def script(queue: QueueView, step: StepBuilder) -> None:
        seqs = _by_prompt(queue)
        assert (step.num_tokens_left, step.num_rows_left) == (16, 3)
        assert not step.add(seqs[5], 0)
        assert step.add(seqs[5], 100)
        assert not step.add(seqs[5], 1)
        assert (step.num_tokens_left, step.num_rows_left) == (11, 2)
        assert step.add(seqs[20], 100)
        assert (step.num_tokens_left, step.num_rows_left) == (0, 1)
        assert not step.add(seqs[6], 1)

    engine = bench(scheduler=Scripted(script), max_num_batched_tokens=16, max_num_seqs=3)
    for length in (5, 6, 20):
        engine.add(str(length), range(length), max_tokens=3)
    engine.step()
    batch = engine.worker.batches[0]
    assert batch.num_tokens.tolist() == [5, 11] and batch.sample.tolist() == [True, False]
    engine.run()


@pytest.mark.parametrize("depth", [1])
def test_preempting_gives_back_tokens_rows_and_blocks_at_once(
    bench: Make, expected: Expected
) -> None:
    def admit(queue: QueueView, step: StepBuilder) -> None:
        seqs = _by_prompt(queue)
        assert step.add(seqs[4], 4) and step.add(seqs[8], 8)
        assert not step.preempt(seqs[9]), "it waits"

    def exchange(queue: QueueView, step: StepBuilder) -> None:
        seqs = _by_prompt(queue)
        assert step.add(seqs[8], 1) and step.num_tokens_left == 11
        assert step.num_rows_left == 0 and not step.add(seqs[9], 9)
        assert not step.preempt(seqs[4]), "the oldest only ever grows"
        assert step.preempt(seqs[8]) and not step.preempt(seqs[8])
        assert (step.num_tokens_left, step.num_rows_left) == (12, 1)
        assert not step.add(seqs[8], 8), "not again in the same step"
        assert step.add(seqs[9], 9)

    engine = bench(
        scheduler=Scripted(admit, exchange),
        max_num_batched_tokens=12,
        max_num_seqs=2,
        num_blocks=6,
    )
    for length in (4, 8, 9):
        engine.add(str(length), range(length), max_tokens=4)
    engine.step()
    assert {delta.request_id for delta in engine.step()} == {"9"}
    assert engine.core.num_running == 2
    outputs = engine.run()
    for length in (4, 8, 9):
        assert outputs[str(length), 0].token_ids == expected(range(length), 4)


def test_one_admitted_and_preempted_in_the_same_step_never_ran(bench: Make) -> None:
    def script(queue: QueueView, step: StepBuilder) -> None:
        first, second = queue.waiting
        assert step.add(first, 9) and step.add(second, 9)
        assert step.preempt(second) and not step.preempt(first)
        assert step.num_rows_left == 7

    engine = bench(scheduler=Scripted(script))
    for name in "ab":
        engine.add(name, range(9), max_tokens=3)
    engine.step()
    assert (engine.core.num_running, engine.core.num_waiting) == (1, 1)
    assert engine.core.ledger()[0].held == 3
    engine.run()
    assert [len(batch.released) for batch in engine.worker.batches[:2]] == [0, 0]


@pytest.mark.parametrize("depth", [1])
def test_the_highest_class_is_protected_before_the_oldest(bench: Make) -> None:
    answers: list[tuple[int, bool]] = []

    def script(queue: QueueView, step: StepBuilder) -> None:
        answers.extend((seq.priority, step.preempt(seq)) for seq in queue.running)

    admit_all = Scripted()
    engine = bench(scheduler=admit_all)
    for name, priority in (("a", 5), ("b", 1), ("c", 1)):
        engine.add(name, [1, 2], max_tokens=4, priority=priority)
    engine.step()
    admit_all._scripts = iter([script])
    engine.step()
    assert answers == [(5, True), (1, False), (1, True)]
    engine.run()


def test_a_reserve_is_kept_and_ends_where_the_sequence_must(bench: Make) -> None:
    def script(queue: QueueView, step: StepBuilder) -> None:
        assert step.add(queue.waiting[0], 4, reserve=1000)

    engine = bench(scheduler=Scripted(script), num_blocks=11, num_speculative_tokens=3)
    engine.add("a", [1, 2, 3, 4], max_tokens=30)
    while engine.core.has_work():
        engine.step()
        # 33 tokens have KV: the last is never computed.
        assert engine.core.ledger()[0].held == (9 if engine.core.has_work() else 0)


def test_a_reserve_that_does_not_fit_admits_nothing(bench: Make) -> None:
    def script(queue: QueueView, step: StepBuilder) -> None:
        first, second = queue.waiting
        assert step.add(first, 4)
        assert not step.add(second, 4, reserve=30)
        assert step.add(second, 4, reserve=20)

    engine = bench(scheduler=Scripted(script), num_blocks=9)
    for name in "ab":
        engine.add(name, [1, 2, 3, 4], max_tokens=28)
    engine.step()
    assert engine.core.ledger()[0].held == 7


@pytest.mark.parametrize("depth", [1])
def test_rejected_drafts_leave_no_blocks_behind(bench: Make) -> None:
    engine = bench(block_sizes=(1,), num_speculative_tokens=5, max_model_len=60)
    engine.add("a", [1, 2, 3], max_tokens=50)
    while engine.core.has_work():
        engine.step()
        if engine.core.has_work():
            num_tokens = 3 + len(engine.outputs["a", 0].token_ids)
            assert engine.core.ledger()[0].held == num_tokens - 1


@pytest.mark.parametrize("depth", [1])
def test_drafts_that_cannot_be_of_use_are_not_asked_for(bench: Make) -> None:
    engine = bench(num_speculative_tokens=6)
    engine.add("a", [1, 2, 3], max_tokens=20)
    num_output = 0
    while engine.core.has_work():
        engine.step()
        batch = engine.worker.batches[-1]
        num_left = 20 - num_output
        assert batch.verify[0] <= num_left - 1
        assert batch.propose[0] <= max(0, num_left - 2)
        num_output = len(engine.outputs["a", 0].token_ids)


def test_drafts_yield_when_kv_is_short(bench: Make, expected: Expected) -> None:
    engine = bench(block_sizes=(1,), num_blocks=41, num_speculative_tokens=4)
    for name in "ab":
        engine.add(name, [1, 2, 3], max_tokens=15)
    engine.step()
    engine.allocator.grow("another", engine.core.ledger()[0].free - 2)
    assert {delta.request_id for delta in engine.step()} == {"a", "b"}
    assert engine.worker.batches[-1].verify.tolist() == [0, 0]
    engine.allocator.release("another")
    engine.step()
    assert engine.worker.batches[-1].verify.tolist() == [4, 4]
    assert engine.run()["b", 0].token_ids == expected([1, 2, 3], 15)


def test_prompt_logprobs_survive_a_preemption(bench: Make) -> None:
    def chunk(queue: QueueView, step: StepBuilder) -> None:
        for seq in (*queue.running, *queue.waiting):
            step.add(seq, 5)

    def preempt(queue: QueueView, step: StepBuilder) -> None:
        assert step.preempt(queue.running[1])

    engine = bench(scheduler=Scripted(chunk, chunk, preempt, chunk, chunk, chunk))
    engine.add("first", range(30), max_tokens=2)
    engine.add("asks", range(20), max_tokens=2, prompt_logprobs=0)
    values = engine.run()["asks", 0].deltas[0].prompt_logprobs
    assert [value and value.token_id for value in values] == [None, *range(1, 20)]


def test_only_committed_tokens_are_published(
    bench: Make, expected: Expected, dict_cache: Any
) -> None:
    tokens = expected([1, 2, 3], 40)
    for stop in tokens[5:15]:
        engine = bench(
            block_sizes=(1,), cache=dict_cache, num_speculative_tokens=6, max_model_len=60
        )
        engine.add("a", [1, 2, 3], max_tokens=40, stop_token_ids=(stop,))
        kept = (1, 2, 3, *engine.run()["a", 0].token_ids)
        assert engine.cache.names[0]
        assert all(kept[: len(key)] == key for _, key in engine.cache.names[0])


def test_a_window_is_trimmed_after_a_preemption_too(bench: Make, expected: Expected) -> None:
    scheduler = Scripted()
    engine = bench(
        scheduler=scheduler,
        block_sizes=(4, 1),
        windows=(None, 5),
        max_num_batched_tokens=6,
    )
    for name in "ab":
        engine.add(name, [1, 2, 3], max_tokens=60)
    for _ in range(40):
        engine.step()
    scheduler._scripts = iter([lambda queue, step: step.preempt(queue.running[1])])
    while engine.core.has_work():
        engine.step()
        assert engine.core.ledger()[1].held <= 2 * (5 - 1) + 6
    assert engine.outputs["b", 0].token_ids == expected([1, 2, 3], 60)
