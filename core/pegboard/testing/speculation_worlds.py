"""Worlds in which a policy chooses: what steps cost there, and what is accepted.

A world has no engine and no model. A step takes so many seconds by its number of tokens, drafting by the
nodes that are asked for; a guess is right with a chance that the world sets, step by step. The policy sees
what an engine would show it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pegboard.interfaces.speculation_policy import Choice, DraftView, SpeculationPolicy, StepCosts

PLAIN_S = 0.02
"""Seconds of a step of one token."""

ROOM = 100_000

StepSeconds = Callable[[int], float]
DraftSeconds = Callable[[int, int, int], float]
"""By rows, most nodes of a row, and nodes of all rows."""


def linear(share: float) -> StepSeconds:
    """Each token costs the same, which is that share of a step of one."""
    return lambda tokens: PLAIN_S * (1 - share + share * tokens)


def roofline(slope: float, knee: int) -> StepSeconds:
    """Bound by memory up to the knee, by arithmetic beyond."""

    def seconds(tokens: int) -> float:
        flat = PLAIN_S * (1 + slope * (min(tokens, knee) - 1))
        return flat * max(1.0, tokens / knee)

    return seconds


def tiled(tile: int) -> StepSeconds:
    """Tokens are computed in tiles, of which each costs nearly as much as the first."""
    return lambda tokens: PLAIN_S * (1 + 0.9 * ((tokens - 1) // tile))


def lookup(rows: int, most: int, nodes: int) -> float:
    return 5e-5


def chain_model(rows: int, most: int, nodes: int) -> float:
    """A small model: it observes, and runs once for each node of the longest chain."""
    return PLAIN_S * (0.01 + 0.08 * most * (1 + 0.02 * rows))


def tree_model(rows: int, most: int, nodes: int) -> float:
    """A small model that makes one tree, however many of its nodes are proposed."""
    return PLAIN_S * (0.01 + (0.15 if nodes else 0.0))


CONFIDENCES: dict[str, Callable[[float], float]] = {
    "true": lambda chance: chance,
    "half": lambda chance: 0.5,
    "sure": lambda chance: 1.0,
    "none": lambda chance: 0.0,
    "over": lambda chance: chance**0.3,
    "under": lambda chance: chance**3,
}
"""What a drafter says of a guess that is right with a chance."""


@dataclass
class World:
    """Rows that decode without end.

    Attributes:
        num_rows, most: rows, and most nodes of each.
        step_s, draft_s: true seconds.
        chance: (row, step) -> the chance that a guess is right.
        says: of `CONFIDENCES`.
        makes_trees: two guesses a depth, the second taking half of what the first leaves.
        gives: share of the rows asked that get drafts.
        noise: of measured seconds, as the standard deviation of their logarithm.
        seed: of everything random.
    """

    num_rows: int
    most: int
    step_s: StepSeconds
    draft_s: DraftSeconds
    chance: Callable[[int, int], float]
    says: str = "true"
    makes_trees: bool = False
    gives: float = 1.0
    noise: float = 0.05
    seed: int = 0


class Measured(StepCosts, Protocol):
    """Costs that are learned from steps."""

    def begin(self, num_tokens: int, num_rows: int) -> None:
        """A step is planned: its tokens without drafts, and the rows that sample."""

    def note(
        self,
        num_rows: int,
        num_tokens: int,
        num_verified: int,
        num_asked: int,
        step_s: float,
        draft_s: float,
    ) -> None:
        """A step was run: its rows, tokens, nodes verified, most nodes asked for of a row, and what it
        took."""


@dataclass
class Row:
    """One row's drafts: its nodes, each one's chance to be accepted, and its child that is right, if one
    is."""

    num_tried: int = 0
    num_accepted: int = 0
    parents: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    right: dict[int, int] = field(default_factory=dict)

    def verify(self, num_nodes: int) -> float:
        """Verifies the first so many nodes. Returns how many were to be expected to be accepted."""
        at, num_accepted = -1, 0
        while at in self.parents[:num_nodes]:
            self.num_tried += 1
            at = self.right.get(at, num_nodes)
            if at >= num_nodes:
                break
            num_accepted += 1
        self.num_accepted += num_accepted
        return sum(self.chances[:num_nodes])


@dataclass
class Ran:
    """One step: tokens to expect and seconds, without chance and noise; nodes verified and asked for."""

    tokens: float
    seconds: float
    verified: int
    asked: int


def run(world: World, policy: SpeculationPolicy, num_steps: int, costs: Measured) -> list[Ran]:
    """Steps of a world, each as the policy chooses. Choices that it may not make are errors."""
    dice = np.random.default_rng(world.seed)
    rows = [Row() for _ in range(world.num_rows)]
    ran = []
    for step in range(num_steps):
        costs.begin(world.num_rows, world.num_rows)
        views = [_view(number, row) for number, row in enumerate(rows)]
        choices = policy.choose(views, ROOM, costs)
        for view, (verify, propose) in zip(views, choices, strict=True):
            assert 0 <= verify <= view.num_drafts and 0 <= propose <= world.most
        verified = sum(choice.verify for choice in choices)
        asked = sum(choice.propose for choice in choices)
        expected = sum(row.verify(choice.verify) for row, choice in zip(rows, choices, strict=True))
        longest = max(choice.propose for choice in choices)
        num_tokens = world.num_rows + verified
        step_s = world.step_s(num_tokens)
        draft_s = world.draft_s(world.num_rows, longest, asked)
        late, later = np.exp(dice.normal(0, world.noise, 2)).tolist()
        costs.note(world.num_rows, num_tokens, verified, longest, step_s * late, draft_s * later)
        ran.append(Ran(world.num_rows + expected, step_s + draft_s, verified, asked))
        for number, (row, choice) in enumerate(zip(rows, choices, strict=True)):
            num_nodes = choice.propose if dice.random() < world.gives else 0
            _draft(row, world, num_nodes, world.chance(number, step), dice)
    return ran


def goodput(ran: list[Ran], after: int) -> float:
    """Tokens a second, the first steps not counted."""
    return sum(one.tokens for one in ran[after:]) / sum(one.seconds for one in ran[after:])


class Always(SpeculationPolicy):
    """The same number of nodes in each step."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    def choose(self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts) -> list[Choice]:
        return [Choice(min(row.num_drafts, self._num_nodes), self._num_nodes) for row in rows]


def _view(number: int, row: Row) -> DraftView:
    is_chain = row.parents == list(range(-1, len(row.parents) - 1))
    return DraftView(
        seq_id=number,
        num_drafts=len(row.parents),
        confidences=row.confidences,
        parents=range(-1, len(row.parents) - 1) if is_chain else row.parents,
        num_tried=row.num_tried,
        num_accepted=row.num_accepted,
        num_left=ROOM,
        max_nodes=ROOM,
    )


def _draft(
    row: Row, world: World, num_nodes: int, chance: float, dice: np.random.Generator
) -> None:
    """New nodes, the likeliest paths first, and which of them are right."""
    guesses = [chance, (1 - chance) / 2] if world.makes_trees else [chance]
    row.parents, row.chances, row.right = [], [], {}
    own_chances = []
    count = itertools.count()
    heap = [(-guess, next(count), -1, guess) for guess in guesses]
    heapq.heapify(heap)
    while len(row.parents) < num_nodes:
        path, _, parent, own = heapq.heappop(heap)
        node = len(row.parents)
        row.parents.append(parent)
        own_chances.append(own)
        row.chances.append(-path)
        for guess in guesses:
            heapq.heappush(heap, (path * guess, next(count), node, guess))
    for parent in set(row.parents):
        point = dice.random()
        for node in (node for node, other in enumerate(row.parents) if other == parent):
            if 0 <= point < own_chances[node]:
                row.right[parent] = node
            point -= own_chances[node]
    says = CONFIDENCES[world.says]
    row.confidences = [says(own) for own in own_chances]
