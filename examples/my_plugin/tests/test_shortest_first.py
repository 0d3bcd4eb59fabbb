"""The order in which this scheduler lets requests run."""

from __future__ import annotations

import pytest

from pegboard.interfaces.scheduler import SchedulerContext
from pegboard.testing.scheduler import SimulatedSequence, Simulation
from pegboard_shortest_first.options import Options
from pegboard_shortest_first.scheduler import ShortestFirst

PROMPTS = {1: 30, 2: 5, 3: 12}


@pytest.mark.parametrize(
    ("max_wait", "order"), [(100, [2, 3, 1]), (1.5, [1, 2, 3]), (0, [1, 2, 3])]
)
def test_short_prompts_run_first_unless_others_waited_too_long(
    max_wait: float, order: list[int]
) -> None:
    context = SchedulerContext(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)
    simulation = Simulation(context, num_blocks=64)
    for seq_id, num_prompt in PROMPTS.items():
        simulation.arrive(
            SimulatedSequence(seq_id, num_prompt, max_tokens=1, arrival=float(seq_id))
        )
    simulation.finish(ShortestFirst(context, Options(max_wait=max_wait)), max_steps=10)
    assert [seq_id for plan in simulation.plans for seq_id in plan] == order
