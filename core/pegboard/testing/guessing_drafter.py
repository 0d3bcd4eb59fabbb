"""A drafter that knows the tokens to come, and guesses right as often as it is told to."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from pegboard.interfaces.drafter import Drafter, Observation
from pegboard.step import Drafts, Float32, Int32, RowAdmission

Outputs = Mapping[tuple[tuple[int, ...], int], Sequence[int]]
"""(prompt, the sequence's number in its request) to the tokens that it becomes."""

Nodes = list[tuple[int, int]]
"""(token, parent) of each node of a row."""


class GuessingDrafter(Drafter):
    """Right, wrong and partly right guesses, in chains and trees.

    Args:
        outputs: the tokens to come. It guesses nothing for other sequences.
        right: share of depths at which the right token is among the guesses.
        width: guesses a depth; with more than one, the path goes on below one of them at random.
        seed: of the choices.

    Attributes:
        random: its dice.
    """

    def __init__(self, outputs: Outputs, right: float, width: int = 1, seed: int = 0) -> None:
        self._outputs = outputs
        self._right = right
        self._width = width
        self.random = random.Random(seed)
        self._coming: dict[int, Sequence[int]] = {}

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        tokens = admission.token_ids.tolist()
        prompt = tuple(tokens[: admission.num_prompt_tokens])
        output = self._outputs.get((prompt, admission.index), ())
        self._coming[admission.row] = output[len(tokens) - len(prompt) :]

    def release(self, row: int, num_tokens: int) -> None:
        del self._coming[row]

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        rows, offsets = [], [0]
        nodes: Nodes = []
        for i, row in enumerate(seen.rows.tolist()):
            num_committed = int(seen.next_offsets[i + 1] - seen.next_offsets[i])
            self._coming[row] = self._coming[row][num_committed:]
            guessed = self.guess(self._coming[row], int(seen.propose[i]))
            if guessed:
                rows.append(row)
                nodes += guessed
                offsets.append(len(nodes))
        drafts = Drafts(
            rows=np.array(rows, np.int32),
            offsets=np.array(offsets, np.int32),
            token_ids=np.array([token for token, _ in nodes], np.int32),
            parents=np.array([parent for _, parent in nodes], np.int32),
        )
        return drafts, np.linspace(0, 1, len(nodes), dtype=np.float32)

    def guess(self, coming: Sequence[int], most: int) -> Nodes:
        """The nodes of a row that becomes these tokens. Wrong tokens are low ids that differ from
        the right one."""
        nodes: Nodes = []
        parent = -1
        for token in coming:
            right = self.random.random() < self._right
            wrong = [other for other in range(self._width + 1) if other != token]
            level = wrong[: self._width]
            at = self.random.randrange(self._width)
            if right:
                level[at] = token
            if len(nodes) + len(level) > most:
                break
            parent, below = len(nodes) + at, parent
            nodes += [(guess, below) for guess in level]
        return nodes
