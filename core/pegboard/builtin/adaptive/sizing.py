"""Which size of step is the best, and which other one might be."""

from __future__ import annotations

import math

import numpy as np

from pegboard.builtin.adaptive.acceptance import Floats, Ints

SHARE = 0.0025
"""Part of the time that trying other sizes may take, in the long run."""

_MOST_STEPS = 3.0
"""Time that may be saved up for it, in steps."""

_ENOUGH = 3
"""Steps of a size after which its seconds are known."""

_FORGET_STEPS = 400
"""Steps after which one of them is forgotten."""

_EXACT = 64
"""Larger sizes are taken together where they differ by less than a sixteenth."""

_LEAST = 0.7
"""What an untried size might take, as a part of what it is thought to, where no lesser size was tried."""


class Sizing:
    """Chooses how many nodes a step verifies, of nodes in the order of their worth.

    Between sizes that were tried, seconds are guessed on a straight line. But they may go up in stairs, and
    the foot of one be the best size. So now and then a size is tried that would be the best if it took no
    longer than the next smaller one that was tried; of a gap the middle.
    """

    def __init__(self) -> None:
        self._visits: Ints = np.zeros(1024, np.int64)
        self._saved_s = math.inf  # as much as may be
        self._num_steps = 0

    def save(self, step_s: float, num_steps: int) -> None:
        """Time has passed, in which steps took about so long."""
        if step_s > 0:  # something was measured
            self._saved_s = min(self._saved_s + SHARE * step_s * num_steps, _MOST_STEPS * step_s)
        self._num_steps += num_steps
        if self._num_steps >= _FORGET_STEPS:
            self._num_steps = 0
            np.maximum(self._visits - 1, 0, out=self._visits)

    def visit(self, num_tokens: int) -> None:
        """A step of so many tokens is run."""
        if num_tokens >= len(self._visits):
            self._visits = np.concatenate([self._visits, np.zeros(num_tokens, np.int64)])
        self._visits[_key(np.array(num_tokens))] += 1

    def choose(self, num_tokens: int, gain: Floats, seconds: Floats, rate: float) -> int:
        """The number of nodes that brings most.

        Args:
            num_tokens: without nodes.
            gain: of 0, 1, 2 ... nodes, the acceptances to expect.
            seconds: of steps with so many.
            rate: tokens that a second brings otherwise.
        """
        score = gain - rate * seconds
        best = int(score.argmax())
        if self._saved_s <= 0 or rate <= 0:
            return best
        sizes = _key(np.arange(num_tokens, num_tokens + len(gain)))
        is_known = self._visits.take(sizes, mode="clip") >= _ENOUGH
        if is_known.all():
            return best
        # The last known one at or before each; -1: there is none.
        before = np.maximum.accumulate(np.where(is_known, np.arange(len(gain)), -1))
        least_s = np.where(before < 0, _LEAST * seconds, seconds[before])
        might = np.where(is_known, -np.inf, gain - rate * least_s)
        other = int(might.argmax())
        if might[other] <= score[best]:
            return best
        (after,) = is_known[other:].nonzero()
        if len(after):
            other = (max(0, int(before[other])) + other + int(after[0])) // 2
        cost_s = float(score[best] - score[other]) / rate
        if cost_s > self._saved_s:
            return best
        self._saved_s -= cost_s
        return other


def _key(num_tokens: Ints) -> Ints:
    return np.where(
        num_tokens <= _EXACT, num_tokens, num_tokens - num_tokens % (num_tokens // 16 + 1)
    )
