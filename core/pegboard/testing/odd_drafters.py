"""Drafters that know the tokens to come, and make of it what a verification finds hardest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from pegboard.interfaces.drafter import Observation
from pegboard.step import Drafts, Float32
from pegboard.testing.guessing_drafter import GuessingDrafter, Nodes, Outputs

ROOT = -1
EOS = 1
"""The end-of-sequence id of the tiny models."""


class Oracle(GuessingDrafter):
    """Right at each depth, among as many wrong siblings as chance wants; as many nodes as asked for."""

    def __init__(self, outputs: Outputs, seed: int = 0) -> None:
        super().__init__(outputs, 1.0, seed=seed)

    def guess(self, coming: Sequence[int], most: int) -> Nodes:
        nodes: Nodes = []
        parent = ROOT
        for token in coming:
            room = most - len(nodes)
            if not room:
                break
            level = [other for other in range(2, 5) if other != token]
            level = level[: self.random.randrange(min(3, room))]
            level.insert(self.random.randint(0, len(level)), token)
            at = len(nodes) + level.index(token)
            nodes += [(guess, parent) for guess in level]
            parent = at
        return nodes


class AnyTree(GuessingDrafter):
    """Any tokens in any tree, now and then a right one; as many nodes as chance wants."""

    def __init__(self, outputs: Outputs, seed: int = 0, vocab_size: int = 300) -> None:
        super().__init__(outputs, 0.5, seed=seed)
        self._vocab_size = vocab_size

    def guess(self, coming: Sequence[int], most: int) -> Nodes:
        dice = self.random
        near = [*coming[:2], EOS, dice.randrange(self._vocab_size)]
        return [
            (dice.choice(near), dice.randrange(ROOT, node)) for node in range(dice.randint(0, most))
        ]


class Adversary(GuessingDrafter):
    """A trick at each turn, by `TRICKS`; the wrong nodes are those that it calls certain."""

    def __init__(self, outputs: Outputs, seed: int = 0) -> None:
        super().__init__(outputs, 1.0, seed=seed)

    def guess(self, coming: Sequence[int], most: int) -> Nodes:
        return self.random.choice(list(self.TRICKS.values()))(list(coming), most)[:most]

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        drafts, _ = super().propose(seen)
        return drafts, (np.arange(len(drafts.token_ids)) % 2).astype(np.float32)

    @staticmethod
    def _twins(coming: list[int], most: int) -> Nodes:
        """Each right node has a twin before it, and the path goes on below the second."""
        nodes: Nodes = []
        parent = ROOT
        for token in coming:
            nodes += [(token, parent), (token, parent)]
            parent = len(nodes) - 1
        return nodes

    @staticmethod
    def _past_the_end(coming: list[int], most: int) -> Nodes:
        return _chain([*coming, EOS, *range(most)])

    @staticmethod
    def _only_ends(coming: list[int], most: int) -> Nodes:
        return _chain([EOS] * most)

    @staticmethod
    def _a_token_late(coming: list[int], most: int) -> Nodes:
        return _chain([*coming[1:], 0])

    @staticmethod
    def _later_tokens_first(coming: list[int], most: int) -> Nodes:
        """What comes later stands at depth one."""
        return [(token, ROOT) for token in coming[::-1][-most:]]

    @staticmethod
    def _a_far_path(coming: list[int], most: int) -> Nodes:
        """Wrong nodes first, then the right path: all of its KV has to move, over itself."""
        num_wrong = max(0, most - len(coming))
        wrong = [((coming[0] + 1 if coming else 0) % 500, ROOT)] * num_wrong
        right = [
            (token, ROOT if depth == 0 else num_wrong + depth - 1)
            for depth, token in enumerate(coming)
        ]
        return [*wrong, *right]

    TRICKS: ClassVar[dict[str, Callable[[list[int], int], Nodes]]] = {
        "twins": _twins,
        "past the end": _past_the_end,
        "only ends": _only_ends,
        "a token late": _a_token_late,
        "later tokens first": _later_tokens_first,
        "a far path": _a_far_path,
    }


def _chain(tokens: Sequence[int]) -> Nodes:
    return [(token, node - 1) for node, token in enumerate(tokens)]


ODD: dict[str, Callable[[Outputs, int], GuessingDrafter]] = {
    "right": lambda outputs, seed: GuessingDrafter(outputs, 1.0, seed=seed),
    "wrong": lambda outputs, seed: GuessingDrafter(outputs, 0.0, seed=seed),
    "adversarial": Adversary,
    "random": AnyTree,
    "oracle": Oracle,
}
"""Name to a drafter of outputs and a seed: see `GuessingDrafter`."""
