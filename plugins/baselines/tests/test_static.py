"""The static scheduler: who is in a batch, and when the next one begins."""

from __future__ import annotations

from pegboard.interfaces.scheduler import SchedulerContext
from pegboard.testing.scheduler import SimulatedSequence, Simulation
from pegboard_baselines.static import StaticBatch


def _simulation(rows: int, budget: int = 64, num_blocks: int = 64) -> Simulation:
    return Simulation(SchedulerContext(rows, budget, 64), num_blocks)


def _run(simulation: Simulation) -> list[list[int]]:
    """The sequences that compute in each step."""
    scheduler = StaticBatch(simulation.context)
    simulation.finish(scheduler, max_steps=200)
    return [sorted(plan) for plan in simulation.plans]


def test_nobody_joins_before_the_longest_has_ended() -> None:
    simulation = _simulation(rows=2)
    for seq_id, max_tokens in enumerate((2, 6, 3, 3)):
        simulation.arrive(SimulatedSequence(seq_id, 4, max_tokens))
    assert _run(simulation) == [[0, 1], [0, 1], *[[1]] * 4, *[[2, 3]] * 3]


def test_who_arrives_while_a_batch_runs_waits_though_rows_are_free() -> None:
    simulation, scheduler = _simulation(rows=8), StaticBatch(SchedulerContext(8, 64, 64))
    simulation.arrive(SimulatedSequence(0, 4, 3))
    simulation.step(scheduler)
    simulation.arrive(SimulatedSequence(1, 4, 1))
    assert [simulation.step(scheduler) for _ in range(3)] == [{0: 1}, {0: 1}, {1: 4}]


def test_prompts_are_computed_in_chunks_before_anybody_decodes() -> None:
    simulation = _simulation(rows=3, budget=8)
    for seq_id in range(3):
        simulation.arrive(SimulatedSequence(seq_id, 6, 2))
    _run(simulation)
    assert simulation.plans == [{0: 6, 1: 2}, {1: 4, 2: 4}, {2: 2}, {0: 1, 1: 1, 2: 1}]


def test_a_batch_is_as_large_as_its_worst_case_leaves_room_for() -> None:
    simulation = _simulation(rows=4, num_blocks=12)
    for seq_id in range(4):
        simulation.arrive(SimulatedSequence(seq_id, 4, 16))
    steps = _run(simulation)
    assert {tuple(step) for step in steps} == {(0, 1), (2, 3)}
    assert simulation.num_preemptions == 0


def test_sequences_that_another_scheduler_left_without_room_make_some() -> None:
    simulation = _simulation(rows=3, num_blocks=6)
    for seq_id in range(3):
        seq = SimulatedSequence(seq_id, 8, 8, num_output=1, num_computed=8, blocks=2)
        simulation.running.append(seq)
    scheduler = StaticBatch(simulation.context)
    scheduler.resync(simulation.queue())
    simulation.finish(scheduler, max_steps=100)
    assert simulation.num_preemptions > 0
