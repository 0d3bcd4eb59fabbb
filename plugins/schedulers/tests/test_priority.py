"""Classes, what they preempt, and how waiting raises them."""

from __future__ import annotations

import pytest

from pegboard.interfaces.scheduler import SchedulerContext
from pegboard.testing.scheduler import SimulatedSequence, Simulation
from pegboard_schedulers.options import PriorityOptions
from pegboard_schedulers.priority import Priority

ROOMY = 1000
"""Blocks that nobody ever lacks."""


def simulation(max_num_seqs: int, num_tokens: int = 64, num_blocks: int = ROOMY) -> Simulation:
    return Simulation(SchedulerContext(max_num_seqs, num_tokens, 64), num_blocks)


def policy(sim: Simulation, max_wait: float | None = None) -> Priority:
    return Priority(sim.context, PriorityOptions(max_wait=max_wait))


def sequence(seq_id: int, priority: int, arrival: float = 0.0, size: int = 4) -> SimulatedSequence:
    return SimulatedSequence(seq_id, size, max_tokens=8, arrival=arrival, priority=priority)


def test_classes_are_admitted_in_order_and_within_one_by_arrival() -> None:
    sim = simulation(max_num_seqs=1)
    for seq_id, (priority, arrival) in enumerate([(1, 0.0), (0, 3.0), (-1, 2.0), (0, 1.0)]):
        sim.arrive(sequence(seq_id, priority, arrival))
    sim.finish(policy(sim), max_steps=40)
    assert list(dict.fromkeys(seq_id for plan in sim.plans for seq_id in plan)) == [2, 3, 1, 0]


def test_a_higher_class_takes_the_row_of_the_newest_of_the_lowest() -> None:
    sim = simulation(max_num_seqs=3)
    scheduler = policy(sim)
    for seq_id, (priority, arrival) in enumerate([(2, 0.0), (2, 1.0), (1, 2.0)]):
        sim.arrive(sequence(seq_id, priority, arrival))
    sim.step(scheduler)
    sim.arrive(sequence(9, 0, arrival=3.0))
    assert set(sim.step(scheduler)) == {0, 2, 9}
    assert sim.num_preemptions == 1


def test_a_higher_class_takes_as_much_kv_as_it_needs() -> None:
    sim = simulation(max_num_seqs=8, num_blocks=8)
    scheduler = policy(sim)
    for seq_id in range(4):
        sim.arrive(sequence(seq_id, 1, arrival=float(seq_id), size=8))
    sim.step(scheduler)
    sim.arrive(sequence(9, 0, arrival=9.0, size=16))
    planned = sim.step(scheduler)
    assert planned[9] == 16
    assert {2, 3} & set(planned) == set()


def test_an_equal_class_preempts_nobody() -> None:
    sim = simulation(max_num_seqs=2)
    scheduler = policy(sim)
    for seq_id in range(2):
        sim.arrive(sequence(seq_id, 1))
    sim.step(scheduler)
    sim.arrive(sequence(9, 1, arrival=1.0))
    assert set(sim.step(scheduler)) == {0, 1}


def test_no_one_slips_past_a_higher_class_that_does_not_fit() -> None:
    sim = simulation(max_num_seqs=8, num_blocks=10)
    scheduler = policy(sim)
    sim.arrive(sequence(0, 0, size=20))
    sim.step(scheduler)
    sim.arrive(sequence(1, 1, arrival=1.0, size=32))
    sim.arrive(sequence(2, 2, arrival=2.0, size=4))
    assert set(sim.step(scheduler)) == {0}


def test_a_short_budget_goes_to_higher_classes_first() -> None:
    sim = simulation(max_num_seqs=4, num_tokens=2)
    scheduler = policy(sim)
    for seq_id, priority in enumerate([3, 2, 1]):
        sim.arrive(sequence(seq_id, priority, size=1))
        sim.step(scheduler)
    assert set(sim.step(scheduler)) == {1, 2}
    sim.arrive(sequence(9, 0, arrival=1.0, size=1))
    assert set(sim.step(scheduler)) == {2, 9}
    assert sim.num_preemptions == 0, "tokens are shared anew in each step; KV need not go for them"


def test_a_prompt_of_a_lower_class_lets_a_newcomer_have_the_tokens() -> None:
    sim = simulation(max_num_seqs=4, num_tokens=8)
    scheduler = policy(sim)
    sim.arrive(sequence(0, 1, size=30))
    assert sim.step(scheduler) == {0: 8}
    sim.arrive(sequence(9, 0, arrival=1.0, size=6))
    assert sim.step(scheduler) == {0: 2, 9: 6}


@pytest.mark.parametrize(("max_wait", "last"), [(5.0, False), (None, True)])
def test_waiting_raises_a_class(max_wait: float | None, last: bool) -> None:
    """A stream of the highest class that fills the engine for 100 seconds."""
    sim = simulation(max_num_seqs=1)
    scheduler = policy(sim, max_wait)
    sim.arrive(sequence(0, 1, arrival=0.5))
    for second in range(100):
        if second % 8 == 0:
            sim.arrive(sequence(1 + second, 0, arrival=float(second)))
        sim.step(scheduler)
    low = [second for second, plan in enumerate(sim.plans) if 0 in plan]
    assert low == [] if last else max(low) <= 24


def test_who_was_raised_is_not_preempted_by_newcomers() -> None:
    sim = simulation(max_num_seqs=1)
    scheduler = policy(sim, max_wait=5.0)
    sim.arrive(sequence(0, 1, arrival=0.0))
    sim.step(scheduler)
    sim.arrive(sequence(1, 0, arrival=5.5))
    sim.finish(scheduler, max_steps=20)
    assert sim.num_preemptions == 0


def test_who_was_raised_ends_while_higher_classes_fill_the_pool() -> None:
    """The engine never preempts the highest class; KV is short for two."""
    sim = simulation(max_num_seqs=2, num_blocks=12)
    scheduler = policy(sim, max_wait=1.0)
    low = SimulatedSequence(0, 8, max_tokens=24, arrival=0.0, priority=1)
    sim.arrive(low)
    sim.step(scheduler)
    for second in range(2, 200):
        if len(sim.waiting) < 2:
            sim.arrive(SimulatedSequence(second, 8, 24, arrival=float(second), priority=0))
        sim.step(scheduler)
    assert low.finished
    assert sum(0 in plan for plan in sim.plans) <= 2 * 24
