"""Seconds that the workers take, learned from the steps so far."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_EXACT = 64
"""Sizes up to this are measured each by itself, larger ones in classes, sixteen from a power of two to the
next. These end at multiples of 4, 8, 16 ...: kernels work in tiles."""

_WINDOW = 24
"""Measurements that a class's mean remembers."""

_PACE_WINDOW = 8
"""Measurements of any class by whose deviations the pace of all is judged."""

_NO_SCATTER = 1.25
"""Mean deviation that is a change of pace, in mean absolute deviations of single measurements."""

_SPREAD = 1.25
"""Standard error of one measurement, in mean absolute deviations. What few measurements said is taken to be
longer by the standard error of their mean, lest the luckiest of many sizes be taken for the best."""

_FIRST = 2
"""First measurements of a class, of which the least counts."""

_MOST_LATE, _MOST_EARLY = 0.2, 0.4
"""Most that one measurement counts for, as the logarithm of its ratio to the mean."""

_UNTRIED = 0.5
"""Seconds of a step of no token, as a part of those of the least size that was measured."""


class MeasuredCosts:
    """The workers' seconds by size of the step: see `StepCosts`.

    Steps in which each row computes one token, and its drafts, are told from those with chunks of prompts,
    which have fewer logits. The latter stand in for sizes beyond the former.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._num_rows = 1
        self._decoding, self._mixed = _Curve(), _Curve()
        self._drafting: dict[int, _Curve] = {}
        self._sizes: list[float] = []
        self._seconds: list[float] = []

    def begin(self, num_tokens: int, num_rows: int) -> None:
        """A step is planned: its tokens without drafts, and the rows that sample."""
        self.num_tokens, self._num_rows = num_tokens, num_rows

    def step_s(self, num_tokens: int) -> float:
        if not self._sizes:
            self._join()
        return _between(self._sizes, self._seconds, num_tokens)

    def steps_s(self, first: int, last: int) -> NDArray[np.float64]:
        if not self._sizes:
            self._join()
        return np.interp(np.arange(first, last + 1), self._sizes, self._seconds)

    def draft_s(self, num_nodes: int) -> float:
        if not self._drafting:
            return 0.0
        # Where there were never about as many rows, of the nearest number of rows.
        wanted = _power(self._num_rows)
        power = min(self._drafting, key=lambda known: abs(known - wanted))
        return self._drafting[power].seconds(num_nodes)

    def note(
        self,
        num_rows: int,
        num_tokens: int,
        num_verified: int,
        num_asked: int,
        step_s: float,
        draft_s: float,
    ) -> None:
        """Notes the seconds of a step.

        Args:
            num_rows: that computed.
            num_tokens: in all, `num_verified` draft nodes included.
            num_asked: most nodes that the drafter was asked for of a row.
        """
        decodes = num_tokens - num_verified == num_rows
        (self._decoding if decodes else self._mixed).note(num_tokens, step_s)
        self._sizes, self._seconds = [], []
        self._drafting.setdefault(_power(num_rows), _Curve()).note(num_asked, draft_s)

    def _join(self) -> None:
        """The curve of steps that decode, and beyond its last size that of the others."""
        sizes, seconds = self._decoding.points()
        more, theirs = self._mixed.points()
        beyond = bisect_right(more, sizes[-1]) if sizes else 0
        sizes, seconds = sizes + more[beyond:], seconds + theirs[beyond:]
        _make_monotone(seconds, [1.0] * len(seconds))
        least = seconds[0] if seconds else 0.0
        self._sizes, self._seconds = [0.0, *sizes], [_UNTRIED * least, *seconds]


class _Curve:
    """Seconds by size. Classes of sizes have a mean each, relative to a pace that all share: a machine
    that gets slower does so for all sizes, also those that are not measured now."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}
        self._pace = self._off = 0.0
        self._scatter = 0.1

    def note(self, size: int, seconds: float) -> None:
        """Notes a measurement."""
        log = math.log(max(seconds, 1e-9)) - self._pace
        mean = self._means.get(_size_class(size))
        if mean is None:
            mean = self._means[_size_class(size)] = _Mean(float(size), log)
        elif mean.num < _FIRST:
            # A step may be late for many reasons, above all a first one, and early for none.
            mean.log = min(mean.log, log)
        else:
            off = max(-_MOST_EARLY, min(_MOST_LATE, log - mean.log))
            mean.log += off / min(mean.num + 1, _WINDOW)
            if mean.num >= _PACE_WINDOW:
                self._keep_pace(mean, off)
        mean.num += 1
        mean.size += (size - mean.size) / min(mean.num, _WINDOW)

    def seconds(self, size: float) -> float:
        """Between what was measured, and none at size 0, on a straight line; beyond as the nearest."""
        sizes, seconds = self.points()
        if sizes[0] > 0:
            sizes, seconds = [0.0, *sizes], [0.0, *seconds]
        return _between(sizes, seconds, size)

    def points(self) -> tuple[list[float], list[float]]:
        """Sizes, and their seconds, none less than those of a lesser size."""
        means = [self._means[each] for each in sorted(self._means)]
        doubt = _SPREAD * self._scatter
        seconds = [
            math.exp(self._pace + mean.log + doubt / math.sqrt(min(mean.num, _WINDOW)))
            for mean in means
        ]
        _make_monotone(seconds, [min(mean.num, _WINDOW) for mean in means])
        return [mean.size for mean in means], seconds

    def _keep_pace(self, mean: _Mean, off: float) -> None:
        """Changes the pace once deviations are more than scatter. What the mean has taken of them by then
        was not its own."""
        self._scatter += (abs(off - self._off) - self._scatter) / 64
        self._off += (off - self._off) / _PACE_WINDOW
        if abs(self._off) > _NO_SCATTER * self._scatter:
            self._pace += self._off
            mean.log -= self._off * _PACE_WINDOW / _WINDOW
            self._off = 0.0


class _Mean:
    """Mean size, and mean logarithm of seconds, of so many measurements."""

    __slots__ = ("log", "num", "size")

    def __init__(self, size: float, log: float) -> None:
        self.size, self.log, self.num = size, log, 0


def _power(num_rows: int) -> int:
    return (max(1, num_rows) - 1).bit_length()


def _size_class(size: int) -> int:
    if size <= _EXACT:
        return size
    power = (size - 1).bit_length()
    return 16 * power + ((size - 1) >> (power - 5))


def _between(sizes: list[float], seconds: list[float], size: float) -> float:
    at = bisect_right(sizes, size)
    if 0 < at < len(sizes):
        part = (size - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at - 1] + part * (seconds[at] - seconds[at - 1])
    return seconds[0 if at == 0 else -1]


def _make_monotone(values: list[float], weights: list[float] | list[int]) -> None:
    """Replaces neighbours that fall by their mean, in place (pool adjacent violators)."""
    if all(low <= high for low, high in pairwise(values)):
        return
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        many = 1
        while pools and pools[-1][0] > value:
            above, heavy, others = pools.pop()
            value = (value * weight + above * heavy) / (weight + heavy)
            weight, many = weight + heavy, many + others
        pools.append((value, weight, many))
    values[:] = [value for value, _, many in pools for _ in range(many)]
