"""In any world, `adaptive` brings nearly as much as the best fixed number, and as no drafts at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pegboard.builtin.adaptive.policy import AdaptivePolicy
from pegboard.engine.step_costs import MeasuredCosts
from pegboard.interfaces.speculation_policy import SpeculationContext, SpeculationPolicy
from pegboard.testing.speculation_policy import MakePolicy, SpeculationPolicyContract
from pegboard.testing.speculation_worlds import (
    Always,
    Ran,
    World,
    chain_model,
    goodput,
    linear,
    lookup,
    roofline,
    tiled,
    tree_model,
)
from pegboard.testing.speculation_worlds import run as run_world

LEAST = 0.97
WARM_UP = 150
NUM_STEPS = 900


class TestAdaptivePolicy(SpeculationPolicyContract):
    @pytest.fixture
    def make(self) -> MakePolicy:
        return AdaptivePolicy


def ratios(world: World, numbers: tuple[int, ...]) -> tuple[float, float]:
    """Goodput as against no drafts, and as against the best of some fixed numbers."""
    ours = goodput(run(world, adaptive(world.most)), WARM_UP)
    fixed = [goodput(run(world, Always(number)), WARM_UP) for number in numbers]
    return ours / fixed[0], ours / max(fixed)


def run(world: World, policy: SpeculationPolicy, num_steps: int = NUM_STEPS) -> list[Ran]:
    return run_world(world, policy, num_steps, MeasuredCosts())


def adaptive(most: int) -> AdaptivePolicy:
    return AdaptivePolicy(SpeculationContext(most))


def _always(chance: float) -> Callable[[int, int], float]:
    return lambda row, step: chance


def _comes_and_goes(row: int, step: int) -> float:
    return 0.9 if step // 150 % 2 else 0.03


def _half_of_the_rows(row: int, step: int) -> float:
    return 0.9 if row % 2 else 0.05


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize(
    ("step_s", "draft_s", "chance"),
    [
        (roofline(0.02, 64), lookup, _always(0.8)),
        (roofline(0.02, 64), chain_model, _comes_and_goes),
        (linear(0.9), lookup, _always(0.5)),
        (linear(0.3), chain_model, _always(0.1)),
        (tiled(8), lookup, _half_of_the_rows),
    ],
    ids=["memory", "memory, comes and goes", "arithmetic", "a drafter that guesses wrong", "tiles"],
)
@pytest.mark.parametrize("says", ["true", "sure"])
def test_it_brings_what_the_best_fixed_number_brings(
    num_rows: int,
    step_s: Callable[[int], float],
    draft_s: Callable[[int, int, int], float],
    chance: Callable[[int, int], float],
    says: str,
) -> None:
    world = World(num_rows, 5, step_s, draft_s, chance, says)
    to_plain, to_best = ratios(world, (0, 1, 2, 3, 5))
    assert to_plain >= LEAST
    assert to_best >= LEAST


def test_trees_are_as_large_as_pays() -> None:
    world = World(4, 16, linear(0.1), tree_model, _always(0.6), makes_trees=True)
    to_plain, to_best = ratios(world, (0, 2, 4, 8, 16))
    assert to_plain >= LEAST
    assert to_best >= LEAST
