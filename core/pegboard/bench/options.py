"""Parses flags of `pegboard bench`: lengths, latency targets, percentiles."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pegboard.bench.summary import NAMES
from pegboard.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

MAX_LENGTH = 2**20

_LENGTHS = re.compile(r"(?:(lognormal):)?(\d{1,7})(?::(\d{1,7}))?")
_TARGET = re.compile(r"([a-z0-9]+):(\d+(?:\.\d+)?)")
_LENGTHS_ALLOWED = "N, LOW:HIGH (uniform) or lognormal:LOW:HIGH, of at least 1"
_SIGMAS = 1.96
"""Standard deviations on each side of a normal distribution's middle 95 percent."""


@dataclass(frozen=True)
class Lengths:
    """A range of lengths of prompts or answers, in tokens.

    Attributes:
        low, high: the least and the most, both possible.
        shape: `uniform`; or `lognormal` with 95 percent between the two, the rest moved to them.
    """

    low: int
    high: int
    shape: Literal["uniform", "lognormal"] = "uniform"

    def sample(self, count: int, rng: np.random.Generator) -> list[int]:
        """So many lengths."""
        if self.shape == "uniform":
            drawn: list[int] = rng.integers(self.low, self.high + 1, size=count).tolist()
            return drawn
        low, high = math.log(self.low), math.log(self.high)
        lengths = rng.lognormal((low + high) / 2, (high - low) / 2 / _SIGMAS, size=count)
        return [min(max(round(length), self.low), self.high) for length in lengths.tolist()]

    def __str__(self) -> str:
        if self.low == self.high:
            return str(self.low)
        return f"{'lognormal ' if self.shape == 'lognormal' else ''}{self.low} to {self.high}"


def parse_lengths(text: str, flag: str) -> Lengths:
    """Raises ConfigError."""
    match = _LENGTHS.fullmatch(text)
    if match is None:
        raise ConfigError(flag, repr(text), allowed=_LENGTHS_ALLOWED)
    low = int(match[2])
    high = low if match[3] is None else int(match[3])
    if not 1 <= low <= high <= MAX_LENGTH:
        raise ConfigError(flag, repr(text), allowed=f"{_LENGTHS_ALLOWED}, at most {MAX_LENGTH}")
    return Lengths(low, high, "lognormal" if match[1] else "uniform")


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Latency to the most milliseconds of it that a good request has.

    Raises:
        ConfigError: a text holds something else than `NAME:MILLISECONDS`, apart by commas or spaces.
    """
    targets = {}
    for word in " ".join(texts).replace(",", " ").split():
        match = _TARGET.fullmatch(word)
        if match is None or match[1] not in NAMES:
            raise ConfigError(
                "--goodput",
                repr(word),
                allowed=f"NAME:MILLISECONDS with a name of {', '.join(NAMES)}",
                fix="--goodput ttft:500,itl:50",
            )
        targets[match[1]] = float(match[2])
    return targets


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Ascending. Raises ConfigError."""
    try:
        percentiles = sorted({float(word) for word in text.split(",")})
    except ValueError:
        percentiles = []
    if not percentiles or not all(0 <= percentile <= 100 for percentile in percentiles):
        raise ConfigError("--percentiles", repr(text), allowed="numbers from 0 to 100: 50,90,99")
    return tuple(percentiles)
