"""Running sequences have room to grow: none is admitted only to be preempted a few steps later."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pegboard.interfaces.scheduler import QueueView, Scheduler, SchedulerContext, StepBuilder

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]


class Eager(Scheduler):
    """Admits whatever the step takes, with a reserve where one is wanted, and preempts the newest."""

    reserve = 0

    def __init__(self, context: SchedulerContext) -> None: ...

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        newest = list(queue.running)
        for seq in queue.running:
            while not step.add(seq, seq.num_pending) and newest:
                step.preempt(newest.pop())
        for seq in queue.waiting:
            step.add(seq, seq.num_pending, self.reserve)


class Reserving(Eager):
    reserve = 1000


def _num_preemptions(engine: Any) -> int:
    admitted = sum(len(batch.admitted) for batch in engine.worker.batches)
    return admitted - len(engine.outputs)


def test_a_newcomer_leaves_a_block_to_each_that_runs(bench: Make) -> None:
    engine = bench(scheduler=Eager, num_blocks=8)
    for name in "abc":
        engine.add(name, [1, 2, 3, 4, 5, 6, 7], max_tokens=6)
    engine.step()
    # Seven blocks: two for each, and a third later. The last one would leave one to the other two.
    assert (engine.core.num_running, engine.core.ledger()[0].free) == (2, 3)
    engine.run()
    assert _num_preemptions(engine) == 0


def test_who_needs_no_more_blocks_needs_no_room(bench: Make) -> None:
    engine = bench(scheduler=Eager, num_blocks=7)
    for name in "abc":
        engine.add(name, [1, 2, 3, 4, 5, 6, 7], max_tokens=2)
    engine.step()
    assert (engine.core.num_running, engine.core.ledger()[0].free) == (3, 0)
    engine.run()


def test_what_is_reserved_is_room(bench: Make) -> None:
    engine = bench(scheduler=Reserving, num_blocks=10)
    for name in "abc":
        engine.add(name, [1, 2, 3, 4, 5, 6, 7], max_tokens=6)
    engine.step()
    assert (engine.core.num_running, engine.core.ledger()[0].free) == (3, 0)
    engine.run()
    assert _num_preemptions(engine) == 0


@pytest.mark.parametrize("depth", [1])
def test_each_group_keeps_its_own_room(bench: Make) -> None:
    engine = bench(scheduler=Eager, block_sizes=(4, 1), windows=(None, 3), num_blocks=(64, 11))
    for name in "ab":
        engine.add(name, [1, 2, 3, 4, 5], max_tokens=6)
    engine.step()
    # Ten blocks of the second group: both prompts would take all.
    assert engine.core.num_running == 1
    engine.step()
    assert engine.core.num_running == 2, "the first one's beginning has left its window"
    engine.run()


def test_one_that_fills_the_pool_begins_when_nothing_runs(bench: Make, expected: Expected) -> None:
    engine = bench(num_blocks=9)
    prompt = list(range(30))
    engine.add("small", [1, 2], max_tokens=3)
    engine.add("large", prompt, max_tokens=3)
    for number in range(20):
        engine.add(f"later {number}", [number, 2], max_tokens=6)
    outputs = engine.run()
    assert outputs["large", 0].token_ids == expected(prompt, 3)
    firsts = [row.token_ids[0] for batch in engine.worker.batches for row in batch.admitted]
    assert firsts[:2] == [1, 0], "nobody passes it"


def test_an_overloaded_pool_does_not_thrash(bench: Make) -> None:
    dice = random.Random(1)
    engine = bench(num_blocks=100, max_num_seqs=16, max_model_len=256)
    for number in range(120):
        prompt = [dice.randint(0, 90) for _ in range(dice.randint(4, 40))]
        engine.add(str(number), prompt, max_tokens=dice.randint(1, 20))
    engine.run()
    assert _num_preemptions(engine) == 0
