"""Steps in flight: what they still do for those that end, fail or are to be preempted is void, and what
such sequences had comes back once they are committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from pegboard.builtin.fcfs import FCFS
from pegboard.errors import EngineError
from pegboard.interfaces.scheduler import QueueView, StepBuilder
from pegboard.interfaces.speculation_policy import (
    Choice,
    DraftView,
    SpeculationPolicy,
    StepCosts,
)
from pegboard.step import StepBatch, StepResult

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]

PROMPT = list(range(1, 12))


@pytest.fixture(params=[2, 3])
def depth(request: pytest.FixtureRequest) -> int:
    """Most steps in flight."""
    count: int = request.param
    return count


def _lags(engine: Any) -> list[int]:
    """For each step, how many before it were not committed when it was launched."""
    return [batch.step_id - batch.fence - 1 for batch in engine.worker.batches]


def test_a_step_is_launched_before_the_one_ahead_is_committed(
    bench: Make, expected: Expected, depth: int
) -> None:
    engine = bench()
    for name in "ab":
        engine.add(name, PROMPT, max_tokens=20)
    outputs = engine.run()
    assert all(outputs[name, 0].token_ids == expected(PROMPT, 20) for name in "ab")
    assert _lags(engine) == [*range(depth), *[depth - 1] * (20 - depth)]
    assert [bool(batch.pending.all()) for batch in engine.worker.batches] == [False] + [True] * 19


def test_nothing_is_planned_past_the_last_token(bench: Make) -> None:
    engine = bench()
    engine.add("a", PROMPT, max_tokens=3)
    engine.run()
    assert [batch.num_computed.tolist() for batch in engine.worker.batches] == [[0], [11], [12]]


def test_what_was_made_after_a_stop_is_void(bench: Make, expected: Expected, depth: int) -> None:
    tokens = expected(PROMPT, 20)
    engine = bench(max_num_seqs=2)
    engine.add("stops", PROMPT, max_tokens=20, stop_token_ids=(tokens[4],))
    engine.add("goes on", PROMPT, max_tokens=20, seed=1)
    engine.add("next", PROMPT, max_tokens=20, seed=2)
    outputs = engine.run()
    assert outputs["stops", 0].token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert outputs["goes on", 0].token_ids == expected(PROMPT, 20, 1)
    assert outputs["next", 0].token_ids == expected(PROMPT, 20, 2)
    first = next(known for known in engine.worker.released if known[0][:11] == tuple(PROMPT))
    assert first[1] == 11 + len(outputs["stops", 0].token_ids) == len(first[0]) - (depth - 1)


def test_rows_and_blocks_come_back_behind_the_fence(bench: Make, depth: int) -> None:
    engine = bench(max_num_seqs=1, num_blocks=17)
    engine.add("a", PROMPT, max_tokens=20)
    for _ in range(depth):
        engine.step()
    engine.core.abort("a")
    engine.add("b", PROMPT[::-1], max_tokens=1)
    num_launched = len(engine.worker.batches)
    for num_left in range(depth - 1, 0, -1):
        (ledger,) = engine.core.ledger()
        assert (ledger.held, ledger.deferred) == (0, depth + 1), "of 12 tokens, or 13"
        assert engine.core.num_running == 0, "its row is given to nobody before"
        assert len(engine.worker.batches) == num_launched, num_left
        engine.step()
    engine.run()
    (ledger,) = engine.core.ledger()
    assert ledger.free == ledger.total
    assert engine.worker.batches[-1].fence == num_launched - 1


def test_aborts_in_flight_are_the_last_word(bench: Make, expected: Expected) -> None:
    for num_steps in range(1, 9):
        engine = bench(max_num_batched_tokens=8)
        for name in "ab":
            engine.add(name, PROMPT, max_tokens=9)
        for _ in range(num_steps):
            engine.step()
        engine.core.abort("a")
        outputs = engine.run()
        assert outputs["a", 0].last.finish_reason == "abort"
        length = len(outputs["a", 0].token_ids)
        assert outputs["a", 0].token_ids == expected(PROMPT, 9)[:length]
        assert outputs["b", 0].token_ids == expected(PROMPT, 9)


class PreemptsOnce(FCFS):
    """Asks once a plan for the second one's place, until it was given."""

    answers: tuple[bool, ...] = ()

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        if len(queue.running) > 1 and not any(self.answers):
            self.answers += (step.preempt(queue.running[1]),)
        super().plan(queue, step)


def test_who_is_in_flight_is_preempted_once_that_is_committed(
    bench: Make, expected: Expected
) -> None:
    schedulers: list[PreemptsOnce] = []

    def make(context: Any) -> PreemptsOnce:
        schedulers.append(PreemptsOnce(context))
        return schedulers[0]

    engine = bench(scheduler=make)
    for name in "ab":
        engine.add(name, PROMPT, max_tokens=12)
    outputs = engine.run()
    assert schedulers[0].answers == (False, True)
    assert all(outputs[name, 0].token_ids == expected(PROMPT, 12) for name in "ab")
    assert 0 in _lags(engine)[1:], "what was in flight was committed first"


class DraftsForOne(SpeculationPolicy):
    """The sequence of the lowest id drafts, the others never."""

    def choose(
        self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts
    ) -> Sequence[Choice]:
        return [Choice(row.num_drafts, 3) if row.seq_id == 1 else Choice(0, 0) for row in rows]


def test_a_row_with_drafts_in_flight_waits_and_the_others_go_on(
    bench: Make, expected: Expected, depth: int
) -> None:
    engine = bench(policy=DraftsForOne(), num_speculative_tokens=3)
    engine.add("first", PROMPT, max_tokens=24)
    engine.add("second", PROMPT, max_tokens=24, seed=1)
    outputs = engine.run()
    assert outputs["first", 0].token_ids == expected(PROMPT, 24)
    assert outputs["second", 0].token_ids == expected(PROMPT, 24, 1)
    flags = [
        dict(zip(b.rows.tolist(), b.pending.tolist(), strict=True)) for b in engine.worker.batches
    ]
    with_drafts = [
        flag for flag, b in zip(flags, engine.worker.batches, strict=True) if b.propose.any()
    ]
    assert len(with_drafts) > 5
    assert not any(flag[0] for flag in with_drafts)
    assert sum(flag.get(1, False) for flag in flags) > 20


def test_a_row_that_fails_in_flight_ends_alone_and_once(bench: Make, expected: Expected) -> None:
    engine = bench()
    engine.worker.fail_rows = lambda row: row.admission.seed == 1 and len(row.tokens) > 13
    engine.add("fails", PROMPT, max_tokens=12, seed=1)
    engine.add("goes on", PROMPT, max_tokens=12)
    outputs = engine.run()
    assert outputs["fails", 0].last.error == "the processor failed"
    assert outputs["fails", 0].token_ids == expected(PROMPT, 3, 1)
    assert outputs["goes on", 0].token_ids == expected(PROMPT, 12)


@pytest.mark.parametrize("error", [ValueError("broke"), KeyboardInterrupt()], ids=repr)
def test_a_step_that_fails_ends_all_requests_whatever_is_behind_it(
    bench: Make, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    engine = bench()
    for name in "abc":
        engine.add(name, PROMPT, max_tokens=9, n=2)
    forward = engine.worker._forward

    def fails(batch: StepBatch) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        result = forward(batch)
        if batch.step_id == 3:
            future.set_exception(error)
        else:
            future.set_result(result)
        return future

    monkeypatch.setattr(
        engine.worker,
        "execute",
        lambda batch: (
            (engine.worker._change_rows(batch), engine.worker._change_tables(batch))
            and fails(batch)
        ),
    )
    deltas = []
    with pytest.raises(EngineError if isinstance(error, Exception) else KeyboardInterrupt):
        for _ in range(50):
            deltas += engine.core.step()
    while engine.core.has_work():
        deltas += engine.core.step()
    ends = sorted((delta.request_id, delta.index) for delta in deltas if delta.finish_reason)
    assert ends == [(name, index) for name in "abc" for index in range(2)]
    with pytest.raises(EngineError, match=type(error).__name__):
        engine.add("late", [1])
    engine.core.close()
    assert engine.worker.closed == 1


def test_closing_ends_what_is_in_flight(bench: Make) -> None:
    engine = bench()
    engine.add("a", PROMPT, max_tokens=9)
    engine.step()
    engine.core.close()
    assert [delta.finish_reason for delta in engine.core.step()] == ["abort"]
    assert not engine.core.has_work() and engine.worker.closed == 1


def test_nothing_is_named_before_the_step_that_wrote_it_is_committed(
    bench: Make, dict_cache: Any, depth: int
) -> None:
    engine = bench(cache=dict_cache)
    engine.add("a", list(range(20)), max_tokens=9)
    for _ in range(depth - 1):
        engine.step()
        assert not engine.cache.names[0]
    engine.step()
    assert len(engine.cache.names[0]) == 5
    engine.run()


def test_what_was_in_flight_at_a_reset_is_not_named(bench: Make, dict_cache: Any) -> None:
    engine = bench(cache=dict_cache)
    engine.add("a", list(range(20)), max_tokens=9)
    engine.step()
    engine.core.reset_prefix_cache()
    engine.run()
    engine.add("b", list(range(20)), max_tokens=2)
    assert engine.run()["b", 0].last.num_cached_tokens == 0


def test_a_caller_that_comes_late_makes_no_step_slow(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step counts from the end of the one ahead, not from its commit; the budget heeds the
    time until the result was there."""
    engine = bench(max_step_s=10.0, max_num_batched_tokens=200, num_blocks=200)
    engine.add("a", [1] * 100, max_tokens=9)
    engine.step()
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 3600)
    noted: list[float] = []
    monkeypatch.setattr(engine.core._budget, "note", lambda tokens, seconds: noted.append(seconds))
    engine.run()
    assert noted and max(noted) < 60
