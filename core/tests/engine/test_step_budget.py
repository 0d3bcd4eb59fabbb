"""A long prompt does not hold up the streams beside it for longer than a step may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.engine.queue import Queue
from pegboard.engine.step_budget import MIN_PROMPT_TOKENS, MIN_TOKENS, StepBudget
from pegboard.interfaces.scheduler import QueueView, Scheduler, SchedulerContext, StepBuilder

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]


class Row:
    """A running sequence, as a budget looks at it."""

    def __init__(self, num_pending: int) -> None:
        self.num_known, self.num_scheduled = 100 + num_pending, 100


class Rows(Queue):
    """A queue with these rows."""

    def __init__(self, *rows: Row) -> None:
        super().__init__(0)
        self._running = dict(enumerate(rows))  # type: ignore[arg-type]


class Greedy(Scheduler):
    """Asks for as much as there is, newcomers first, whatever room it is told of."""

    def __init__(self, context: SchedulerContext) -> None: ...

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        for seq in (*queue.waiting, *reversed(queue.running)):
            step.add(seq, 10**6)


ONE = Rows(Row(1))


def _measured(steps: dict[int, float], most: int = 2048, max_step_s: float = 0.2) -> StepBudget:
    budget = StepBudget(most, max_step_s)
    for num_tokens, seconds in steps.items():
        budget.note(num_tokens, seconds)
    return budget


@pytest.mark.parametrize(
    ("steps", "lowered"),
    [
        ({}, 64),
        ({2048: 2.5}, 128),
        ({2048: 2.5, 128: 0.19}, 128),
        ({2048: 2.5, 128: 0.09}, 256),
        ({2048: 0.19}, 2048),
        ({64: 0.02}, 512),
        ({64: 0.3}, 64),
        ({40: 0.02}, 256),
        ({7: 0.1}, 64),
        ({256: 0.21, 512: 0.18}, 512),
        ({1500: 0.19}, 1024),
    ],
)
def test_the_largest_size_counts_whose_step_is_short_enough(
    steps: dict[int, float], lowered: int
) -> None:
    assert _measured(steps).num_tokens(ONE) == lowered


@pytest.mark.parametrize("max_step_s", [None, 0.2])
def test_a_prompt_that_nobody_waits_for_gets_all(max_step_s: float | None) -> None:
    budget = StepBudget(2048, max_step_s)
    budget.note(2048, 2.5)
    assert budget.num_tokens(Rows()) == 2048
    assert budget.num_tokens(Rows(Row(1000), Row(2))) == 2048
    assert budget.num_tokens(ONE) == (2048 if max_step_s is None else 128)


def test_sequences_that_decode_fit_and_a_chunk_beside_them() -> None:
    budget = StepBudget(2048, 0.2)
    budget.note(64, 1.0)
    rows = [Row(1) for _ in range(100)]
    assert budget.num_tokens(Rows(*rows, Row(500))) == 100 + MIN_PROMPT_TOKENS
    assert StepBudget(110, 0.2).num_tokens(Rows(*rows)) == 110


@pytest.mark.parametrize("most", [1, 50, 64, 100, 3000])
def test_no_budget_exceeds_the_most_of_a_step(most: int) -> None:
    assert _measured({}, most).num_tokens(ONE) == min(most, MIN_TOKENS)
    assert _measured({most: 0.001}, most).num_tokens(ONE) <= most
    assert _measured({64: 0.0001}, most).num_tokens(ONE) == most


def test_what_was_slow_once_is_tried_again() -> None:
    budget = _measured({512: 0.15, 256: 0.08})
    budget.note(512, 9.0)
    assert budget.num_tokens(ONE) == 256
    for _ in range(50):
        budget.note(256, 0.08)
    assert budget.num_tokens(ONE) == 512


def test_what_is_slow_now_is_heeded_at_once() -> None:
    budget = _measured({512: 0.15})
    budget.note(512, 0.3)
    assert budget.num_tokens(ONE) == 256
    budget.note(256, 0.3)
    assert budget.num_tokens(ONE) == 128


def test_a_prompt_is_cut_while_others_decode_and_loses_no_token(
    bench: Make, expected: Expected
) -> None:
    engine = _beside_a_long_prompt(bench)
    outputs = engine.run()
    assert len(outputs["alone", 0].deltas) == 40, "it gets a token from each step"
    assert outputs["alone", 0].token_ids == expected(range(90), 40)
    assert outputs["long", 0].token_ids == expected([1] * 800, 3)


def test_no_scheduler_passes_over_the_budget(bench: Make) -> None:
    engine = _beside_a_long_prompt(bench, scheduler=Greedy)
    engine.run()
    cut = [batch for batch in engine.worker.batches[1:] if batch.num_tokens.max() > 1]
    assert len(cut) >= 800 // MIN_TOKENS
    assert max(int(batch.num_tokens.sum()) for batch in cut) == MIN_TOKENS


def _beside_a_long_prompt(bench: Make, **values: Any) -> Any:
    """An engine in which one sequence decodes, every step takes too long, and a long prompt waits."""
    sizes = {"max_model_len": 1000, "num_blocks": 600, "max_num_batched_tokens": 500}
    engine = bench(max_step_s=1e-9, **sizes, **values)
    engine.add("alone", range(90), max_tokens=40)
    engine.step()
    assert engine.worker.batches[0].num_tokens.tolist() == [90]
    engine.add("long", [1] * 800, max_tokens=3)
    return engine


def test_every_prompt_goes_on_beside_many_that_decode(bench: Make) -> None:
    engine = bench(max_step_s=1e-9, max_num_seqs=81, max_num_batched_tokens=200, num_blocks=900)
    for number in range(80):
        engine.add(f"short {number}", [number], max_tokens=60)
    while engine.core.num_waiting:
        engine.step()
    num_before = len(engine.worker.batches)
    engine.add("long", [1] * 100, max_tokens=3)
    for _ in range(3):
        engine.step()
    chunks = [int(batch.num_tokens.max()) for batch in engine.worker.batches[num_before:]]
    assert chunks == [32, 32, 32]
    assert all(len(batch.rows) == 81 for batch in engine.worker.batches[num_before:])
