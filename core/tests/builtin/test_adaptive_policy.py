"""In any world, `adaptive` brings nearly as much as the best fixed number, and as no drafts at all."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pegboard.builtin.adaptive.policy import AdaptivePolicy
from pegboard.engine.step_costs import MeasuredCosts
from pegboard.interfaces.speculation_policy import (
    Choice,
    DraftView,
    SpeculationContext,
    SpeculationPolicy,
)
from pegboard.testing.speculation_policy import (
    LinearCosts,
    MakePolicy,
    SpeculationPolicyContract,
)
from pegboard.testing.speculation_worlds import (
    CONFIDENCES,
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

Chance = Callable[[int, int], float]

LEAST = 0.97
WARM_UP = 200
NUM_STEPS = 800
CHAINS = (0, 1, 2, 3, 5)
TREES = (0, 2, 4, 8, 12)


class TestAdaptivePolicy(SpeculationPolicyContract):
    @pytest.fixture
    def make(self) -> MakePolicy:
        return AdaptivePolicy


def always(chance: float) -> Chance:
    return lambda row, step: chance


def in_turn(chance: float, other: float, num_steps: int) -> Chance:
    return lambda row, step: chance if step // num_steps % 2 else other


def half_of_the_rows(chance: float, other: float) -> Chance:
    return lambda row, step: chance if row % 2 else other


WORLDS = {
    "memory": World(1, 5, roofline(0.02, 64), lookup, always(0.8)),
    "memory, a knee": World(16, 5, roofline(0.02, 64), lookup, always(0.8), "half"),
    "comes and goes": World(1, 5, roofline(0.02, 64), chain_model, in_turn(0.9, 0.03, 150), "sure"),
    "comes and goes, rows": World(8, 5, linear(0.05), chain_model, in_turn(0.9, 0.03, 150)),
    "arithmetic": World(4, 5, linear(0.9), lookup, always(0.5), "sure"),
    "arithmetic, many rows": World(64, 5, linear(0.9), lookup, always(0.7), noise=0.1),
    "bad guesses": World(2, 5, linear(0.3), chain_model, always(0.1), "sure"),
    "good guesses called bad": World(2, 5, linear(0.1), chain_model, always(0.8), "none"),
    "tiles": World(4, 5, tiled(16), lookup, always(0.97), "half"),
    "some rows": World(8, 5, linear(0.3), lookup, half_of_the_rows(0.95, 0.05), "sure"),
    "rare guesses": World(1, 5, linear(0.3), lookup, always(0.9), gives=0.1),
    "trees": World(4, 12, linear(0.1), tree_model, always(0.6), makes_trees=True),
    "trees, unsure": World(2, 12, linear(0.02), tree_model, always(0.5), "under", makes_trees=True),
}


def run(world: World, policy: SpeculationPolicy, num_steps: int = NUM_STEPS) -> list[Ran]:
    return run_world(world, policy, num_steps, MeasuredCosts())


def adaptive(most: int = 5) -> AdaptivePolicy:
    return AdaptivePolicy(SpeculationContext(most))


def ratios(world: World) -> tuple[float, float]:
    """Goodput as against no drafts, and as against the best of some fixed numbers."""
    ours = goodput(run(world, adaptive(world.most)), WARM_UP)
    numbers = TREES if world.makes_trees else CHAINS
    fixed = [goodput(run(world, Always(number)), WARM_UP) for number in numbers]
    return ours / fixed[0], ours / max(fixed)


@pytest.mark.parametrize("name", WORLDS)
def test_it_brings_what_the_best_fixed_number_brings(name: str) -> None:
    to_plain, to_best = ratios(WORLDS[name])
    assert to_plain >= LEAST
    assert to_best >= LEAST


def any_world(seed: int) -> World:
    """A world by chance; the seed says which."""
    dice = random.Random(seed)
    makes_trees = dice.random() < 0.25
    steps = [linear(share) for share in (0.02, 0.1, 0.3, 0.6, 0.95)]
    steps += [roofline(0.02, knee) for knee in (8, 32, 128)]
    steps += [tiled(tile) for tile in (4, 8, 16)]
    good, bad = dice.choice([0.3, 0.5, 0.7, 0.9, 0.97]), dice.choice([0.02, 0.2, 0.5, 0.8])
    chances = [
        always(good),
        in_turn(good, bad, dice.choice([150, 300])),
        half_of_the_rows(good, bad),
    ]
    says = ["true", "over", "under"] if makes_trees else list(CONFIDENCES)
    return World(
        num_rows=dice.choice([1, 2, 4, 8, 16, 32, 64]),
        most=12 if makes_trees else 5,
        step_s=dice.choice(steps),
        draft_s=tree_model if makes_trees else dice.choice([lookup, chain_model]),
        chance=dice.choice(chances),
        says=dice.choice(says),
        makes_trees=makes_trees,
        gives=dice.choice([1.0, 1.0, 0.5, 0.1]),
        noise=dice.choice([0.02, 0.05, 0.1]),
        seed=seed,
    )


@pytest.mark.slow
def test_any_world_is_met() -> None:
    found = {seed: ratios(any_world(seed)) for seed in range(80)}
    assert min(to_plain for to_plain, _ in found.values()) >= LEAST
    to_best = sorted(to_best for _, to_best in found.values())
    # Where a few tokens are at stake of hundreds, what is best takes longer to see.
    assert to_best[4] >= LEAST, found
    assert to_best[0] >= 0.93, found


def test_what_is_in_vain_is_seldom_tried() -> None:
    for num_rows in (1, 16):
        world = World(num_rows, 5, linear(0.9), chain_model, always(0.0), "sure")
        ran, plain = (run(world, policy, 3000) for policy in (adaptive(), Always(0)))
        assert goodput(ran, 500) >= 0.99 * goodput(plain, 500)
        assert sum(one.verified for one in ran[500:]) > 0, "it was never tried again"


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("draft_s", [lookup, chain_model])
def test_guesses_that_become_right_are_verified_again(
    num_rows: int, draft_s: Callable[[int, int, int], float]
) -> None:
    since = 1500
    world = World(
        num_rows,
        5,
        roofline(0.02, 64),
        draft_s,
        lambda row, step: 0.95 if step >= since else 0.0,
        "half",
    )
    ran = run(world, adaptive(), since + 400)
    used = [one.verified / num_rows for one in ran]
    assert sum(used[since - 200 : since]) <= 25
    assert sum(used[since + 300 :]) > 300


def test_without_a_change_nothing_is_decided() -> None:
    """The steps between two plans cost next to nothing where no row holds drafts."""
    policy, costs = adaptive(), LinearCosts(base_s=1.0, token_s=1.0)
    rows = [DraftView(number, 0, (), (), 0, 0, 100, 5) for number in range(4)]
    answers = [policy.choose(rows, 64, costs) for _ in range(100)]
    assert len({id(answer) for answer in answers}) < 40
    assert all(choice == Choice(0, 5) for answer in answers for choice in answer)


def test_a_row_has_no_more_nodes_than_its_request_wants() -> None:
    policy, costs = adaptive(), LinearCosts(base_s=1.0)
    held = (0.9,) * 4

    def rows(num_tried: int) -> list[DraftView]:
        return [
            DraftView(0, 4, held, range(-1, 3), num_tried, num_tried, 100, 5),
            DraftView(1, 2, held[:2], range(-1, 1), 0, 0, 100, 2),
            DraftView(2, 0, (), (), 0, 0, 100, 0),
            DraftView(3, 4, held, range(-1, 3), 0, 0, 2, 5),
        ]

    for step in range(40):
        first, second, third, last = policy.choose(rows(4 * step), 64, costs)
        assert second.propose <= 2 and third == Choice(0, 0)
        assert last.verify <= 1 and last.propose == 0
    assert first == Choice(4, 5)
