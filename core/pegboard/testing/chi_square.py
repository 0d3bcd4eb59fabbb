"""Chi-square tests of counts. Outcomes that are rare are put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

LEAST_EXPECTED = 5.0
"""Of an outcome, for its count to be near a normal distribution."""

Outcome = TypeVar("Outcome")


def p_of_counts(
    counts: Mapping[Outcome, int], probabilities: Mapping[Outcome, float | Fraction]
) -> float:
    """The probability that counts of outcomes lie as far off those expected, or farther."""
    if not set(counts) <= {outcome for outcome, p in probabilities.items() if p}:
        return 0.0
    total = sum(counts.values())
    pairs = [(counts.get(outcome, 0), total * float(p)) for outcome, p in probabilities.items()]
    table = _put_together(sorted(pairs, key=lambda pair: pair[1]), 1)
    return _p(table[:, 0], table[:, 1], len(table) - 1)


def p_of_samples(first: Mapping[Outcome, int], second: Mapping[Outcome, int]) -> float:
    """The probability that counts of two samples of one distribution differ as much, or more."""
    pairs = [(first.get(outcome, 0), second.get(outcome, 0)) for outcome in {**first, **second}]
    # Which sample an outcome was seen in must not decide with which it is put together.
    order = np.random.default_rng(0).permutation(len(pairs)).tolist()
    pairs = sorted((pairs[at] for at in order), key=sum)
    table = _put_together(pairs, None)
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    return _p(table, expected, len(table) - 1)


def _put_together(pairs: Iterable[tuple[float, float]], column: int | None) -> NDArray[np.float64]:
    """Sums of pairs, in their order, until a column is large enough, or half of both."""
    sums = [np.zeros(2)]
    for pair in pairs:
        last = sums[-1].sum() / 2 if column is None else sums[-1][column]
        if last >= LEAST_EXPECTED:
            sums.append(np.zeros(2))
        sums[-1] = sums[-1] + pair
    return np.array(sums)


def _p(seen: NDArray[np.float64], expected: NDArray[np.float64], freedom: int) -> float:
    import torch

    if not freedom:
        return 1.0
    statistic = float(((seen - expected) ** 2 / expected).sum())
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))
