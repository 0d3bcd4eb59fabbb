"""How often a guess was right, by the length of the match that it came from."""

from __future__ import annotations

from collections.abc import Sequence

DECAY = 0.9
"""What is left of an older observation with each newer one."""

PRIOR_WEIGHT = 2.0
"""Observations that the belief at the start counts for."""


class HitRates:
    """Shares of right guesses of one row. They are counted at every token, whether or not anything was
    drafted, so that they are known when drafting begins again."""

    def __init__(self, match_lengths: Sequence[int]) -> None:
        """
        Args:
            match_lengths: of each class, the length that it stands for.
        """
        self._tried = [PRIOR_WEIGHT] * len(match_lengths)
        self._right = [PRIOR_WEIGHT * length / (length + 2) for length in match_lengths]

    def count(self, kind: int, is_right: bool) -> None:
        """A guess from a match of this class was right or wrong."""
        self._tried[kind] = self._tried[kind] * DECAY + 1
        self._right[kind] = self._right[kind] * DECAY + is_right

    def __getitem__(self, kind: int) -> float:
        """The probability that a guess from a match of this class is right."""
        return self._right[kind] / self._tried[kind]
