"""First come, first served: what its policy is, beside what every scheduler owes."""

from __future__ import annotations

import pytest

from pegboard.builtin.fcfs import FCFS
from pegboard.interfaces.scheduler import SchedulerContext
from pegboard.testing.scheduler import SimulatedSequence, Simulation


def _simulate(
    num_blocks: int, sequences: list[SimulatedSequence], max_num_batched_tokens: int = 32
) -> Simulation:
    context = SchedulerContext(8, max_num_batched_tokens, 256)
    simulation = Simulation(context, num_blocks)
    for seq in sequences:
        simulation.arrive(seq)
    simulation.finish(FCFS(context), max_steps=5000)
    return simulation


def test_earlier_arrivals_begin_earlier() -> None:
    sequences = [SimulatedSequence(i, 6, 3, arrival=float(9 - i)) for i in range(10)]
    plans = _simulate(100, sequences, max_num_batched_tokens=6).plans
    begun = list(dict.fromkeys(seq_id for plan in plans for seq_id in plan))
    assert begun == list(range(9, -1, -1))


def test_a_prompt_begins_only_when_its_whole_kv_fits() -> None:
    sequences = [SimulatedSequence(i, 40, 4, arrival=float(i)) for i in range(4)]
    simulation = _simulate(13, sequences, max_num_batched_tokens=8)
    assert simulation.num_preemptions == 0


def test_a_short_request_does_not_pass_a_long_one() -> None:
    long, short = SimulatedSequence(1, 40, 1, arrival=1.0), SimulatedSequence(2, 2, 1, arrival=2.0)
    busy = SimulatedSequence(0, 16, 8, arrival=0.0)
    plans = _simulate(12, [busy, long, short], max_num_batched_tokens=64).plans
    assert next(i for i, plan in enumerate(plans) if 2 in plan) >= next(
        i for i, plan in enumerate(plans) if 1 in plan
    )


@pytest.mark.parametrize("num_blocks", [24, 32, 48])
def test_preempted_sequences_are_not_preempted_over_and_over(num_blocks: int) -> None:
    sequences = [SimulatedSequence(i, 8, 60, arrival=float(i)) for i in range(16)]
    simulation = _simulate(num_blocks, sequences)
    assert 0 < simulation.num_preemptions < 2 * len(sequences)
