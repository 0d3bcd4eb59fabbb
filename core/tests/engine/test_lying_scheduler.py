"""A scheduler that is wrong can cost time, never a token, a block or the engine's going on: the builder
holds the truth, and the built-in policy plans where the scheduler errs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pegboard.engine import breaker as breaker_module
from pegboard.interfaces.observer import BreakerChanged, Event, Observer
from pegboard.interfaces.scheduler import QueueView, Scheduler, StepBuilder
from pegboard.testing.erring_drafter import Panic

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]
Plan = Callable[["Lying", QueueView, Any], object]


class Lying(Scheduler):
    """Plans by a function."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.num_plans = 0
        self.kept: StepBuilder | None = None
        self.resynced: list[int] = []

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        self.num_plans += 1
        self._plan(self, queue, step)

    def resync(self, queue: QueueView) -> None:
        self.resynced.append(len(queue.running) + len(queue.waiting))


def everybody(queue: QueueView) -> list[Any]:
    return [*queue.running, *queue.waiting]


def well(_: Lying, queue: QueueView, step: Any) -> None:
    for seq in everybody(queue):
        step.add(seq, seq.num_pending)


def too_much(_: Lying, queue: QueueView, step: Any) -> None:
    for seq in everybody(queue):
        step.add(seq, 10**30, 10**30)


def many_times(_: Lying, queue: QueueView, step: Any) -> None:
    for seq in everybody(queue) * 3:
        step.add(seq, 1)
        step.add(seq, 7)


def after_preempting(_: Lying, queue: QueueView, step: Any) -> None:
    for seq in everybody(queue):
        step.add(seq, 5)
        step.preempt(seq)
        step.add(seq, 5)
        step.preempt(seq)


def everybody_preempted(_: Lying, queue: QueueView, step: Any) -> None:
    for seq in queue.running:
        step.preempt(seq)
    well(_, queue, step)


def newest_alone(_: Lying, queue: QueueView, step: Any) -> None:
    """The oldest never goes on; of the others one at a time begins, and is preempted at once."""
    for seq in queue.running:
        step.preempt(seq)
    for seq in reversed(queue.waiting):
        if step.add(seq, 1):
            return


def nothing(_: Lying, queue: QueueView, step: Any) -> None:
    pass


def nothing_but_preemptions(_: Lying, queue: QueueView, step: Any) -> None:
    for seq in queue.running:
        step.preempt(seq)


def every_other_time(lying: Lying, queue: QueueView, step: Any) -> None:
    if lying.num_plans % 2:
        well(lying, queue, step)


def strangers(_: Lying, queue: QueueView, step: Any) -> None:
    for seq_id in (-1, 0, 10**9, None, "1", 1.5, float("nan"), (1,)):
        stranger = SimpleNamespace(seq_id=seq_id, num_pending=4)
        step.add(stranger, 4)
        step.preempt(stranger)
    for seq in everybody(queue):
        step.add(SimpleNamespace(seq_id=seq.seq_id, num_pending=10**9), 10**9)


def with_another_builder(lying: Lying, queue: QueueView, step: Any) -> None:
    kept = lying.kept or step
    for seq in everybody(queue):
        kept.preempt(seq)
        kept.add(seq, 9)
    lying.kept = step


def raises_half_way(lying: Lying, queue: QueueView, step: Any) -> None:
    for seq in reversed(queue.running):
        step.preempt(seq)
    for seq in queue.waiting:
        step.add(seq, 3, 5)
    raise ZeroDivisionError("half way")


def exits(lying: Lying, queue: QueueView, step: Any) -> None:
    well(lying, queue, step)
    raise SystemExit(3)


def panics(lying: Lying, queue: QueueView, step: Any) -> None:
    well(lying, queue, step)
    raise Panic


def recurs(lying: Lying, queue: QueueView, step: Any) -> None:
    recurs(lying, queue, step)


def of_no_number(lying: Lying, queue: QueueView, step: Any) -> None:
    for seq in everybody(queue):
        step.add(seq, -3)
        step.add(seq, 3, -(10**9))
        step.add(seq, "all")


def of_no_sequence(lying: Lying, queue: QueueView, step: Any) -> None:
    step.add(None, 3)


def of_no_hash(lying: Lying, queue: QueueView, step: Any) -> None:
    step.preempt(SimpleNamespace(seq_id=[]))


def at_random(lying: Lying, queue: QueueView, step: Any) -> None:
    """Does anything that another one does, or a part of it."""
    chance = random.Random(lying.num_plans)
    for _ in range(chance.randrange(3)):
        chance.choice([*HARMLESS, *CUT_OFF, well])(lying, queue, step)
    for seq in everybody(queue):
        if chance.random() < 0.3:
            step.preempt(seq)
        if chance.random() < 0.6:
            step.add(seq, chance.randrange(-1, 20), chance.randrange(-1, 20))


HARMLESS: tuple[Plan, ...] = (
    well,
    too_much,
    many_times,
    after_preempting,
    everybody_preempted,
    every_other_time,
    strangers,
)
"""They ask for too much, which the builder refuses, and each step goes on all the same."""

CUT_OFF: tuple[Plan, ...] = (
    newest_alone,
    nothing,
    nothing_but_preemptions,
    with_another_builder,
    raises_half_way,
    exits,
    panics,
    recurs,
    of_no_number,
    of_no_sequence,
    of_no_hash,
)


def serve(engine: Any, expected: Expected) -> None:
    """Requests of which each has the tokens that it has to have, in a pool that is too small for all."""
    for number in range(7):
        prompt = [number % 3] * 9 + list(range(number))
        engine.add(f"{number}", prompt, max_tokens=14, n=1 + number % 2)
    outputs = engine.run()
    for number in range(7):
        prompt = [number % 3] * 9 + list(range(number))
        for index in range(1 + number % 2):
            output = outputs[f"{number}", index]
            assert output.token_ids == expected(prompt, 14, index=index)
            assert output.last.finish_reason == "length"
    engine.core.reset_prefix_cache()
    assert all(ledger.free == ledger.total for ledger in engine.core.ledger())


@pytest.mark.parametrize("speculates", [0, 3], ids=["plain", "drafts"])
@pytest.mark.parametrize("pause_s", [0.001, 60.0], ids=["tried again soon", "cut off"])
@pytest.mark.parametrize("plan", [*HARMLESS, *CUT_OFF, at_random], ids=lambda plan: plan.__name__)
def test_no_plan_changes_a_token_or_stops_anything(
    bench: Make,
    dict_cache: Any,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    plan: Plan,
    pause_s: float,
    speculates: int,
) -> None:
    monkeypatch.setattr(breaker_module, "FIRST_PAUSE_S", pause_s)
    lying = Lying(plan)
    engine = bench(
        scheduler=lambda context: lying,
        cache=dict_cache,
        num_blocks=65 if plan in HARMLESS else 24,
        max_num_seqs=5,
        max_num_batched_tokens=32,
        num_speculative_tokens=speculates,
    )
    serve(engine, expected)
    assert lying.num_plans
    if plan in HARMLESS:
        assert not engine.core.cut_off and not lying.resynced
    if plan in CUT_OFF and pause_s > 1:
        (cut_off,) = engine.core.cut_off
        assert (cut_off.part, cut_off.name) == ("scheduler", "Lying")
    elif plan in CUT_OFF:
        assert lying.resynced and all(lying.resynced)


@pytest.mark.parametrize("depth", [1])
def test_a_step_is_planned_although_the_scheduler_raises(bench: Make) -> None:
    engine = bench(scheduler=lambda context: Lying(raises_half_way))
    engine.add("a", [1, 2, 3], max_tokens=4)
    assert [delta.request_id for delta in engine.step()] == ["a"]


@pytest.mark.timing
def test_a_slow_plan_is_another_ones(
    bench: Make, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(lying: Lying, queue: QueueView, step: Any) -> None:
        time.sleep(0.5)
        well(lying, queue, step)

    monkeypatch.setattr(breaker_module, "MAX_CALL_S", 0.3)
    engine = bench(scheduler=lambda context: Lying(slowly))
    serve(engine, expected)
    (cut_off,) = engine.core.cut_off
    assert "s; allowed: 0.3" in cut_off.reason


class Listening(Observer):
    def __init__(self) -> None:
        self.changes: list[BreakerChanged] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, BreakerChanged):
            self.changes.append(event)

    def close(self) -> None:
        pass


def test_a_scheduler_that_mends_its_ways_plans_again(
    bench: Make, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumbling(lying: Lying, queue: QueueView, step: Any) -> None:
        well(lying, queue, step)
        if lying.num_plans == 3:
            raise ValueError("oops")

    monkeypatch.setattr(breaker_module, "FIRST_PAUSE_S", 0.0)
    listening, lying = Listening(), Lying(stumbling)
    engine = bench(scheduler=lambda context: lying, observers=(listening,))
    serve(engine, expected)
    assert [change.is_open for change in listening.changes] == [True, False]
    assert len(lying.resynced) == 1 and lying.num_plans > 10


def test_a_scheduler_that_waits_in_vain_is_not_to_blame(bench: Make) -> None:
    """Where nobody can plan anything, the request is failed and the scheduler stays."""
    engine = bench(scheduler=lambda context: Lying(nothing), fallback_scheduler=Lying(nothing))
    engine.add("a", [1, 2], max_tokens=9)
    outputs = engine.run(max_steps=100)
    assert outputs["a", 0].last.finish_reason == "error"
    assert not engine.core.cut_off


def test_an_interruption_while_planning_changes_nothing(bench: Make, expected: Expected) -> None:
    def interrupted(lying: Lying, queue: QueueView, step: Any) -> None:
        well(lying, queue, step)
        if lying.num_plans == 3:
            raise KeyboardInterrupt

    engine = bench(scheduler=lambda context: Lying(interrupted))
    engine.add("a", [1, 2], max_tokens=9)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert engine.run()["a", 0].token_ids == expected([1, 2], 9)
    assert not engine.core.cut_off
