"""Reads the server's `/metrics` while the load runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

PERIOD_S = 0.5
"""Between two looks."""

FRESH_S = 3.0
"""Seconds to wait for numbers that are newer than a moment, if the server tells their age."""

_PREFIXES = ("pegboard_", "vllm:")
_RUNNING = ("num_requests_running",)
_KV_USE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
_STEPS = ("step_sequences_bucket",)
_AGE = ("engine_metrics_age_seconds",)
_DRAFTS = "spec_decode_"
_WANTED = tuple(
    prefix + name for name in (*_RUNNING, *_KV_USE, *_STEPS, *_AGE, _DRAFTS) for prefix in _PREFIXES
)


@dataclass(frozen=True)
class Histogram:
    """A histogram: how often each number was seen.

    Attributes:
        of: what was counted: engine `steps`, or `samples` of the running requests.
        bins: first and last number of each bin (the last bin may have no end), and how often.
    """

    of: str
    bins: tuple[tuple[int, int | None, float], ...]


@dataclass(frozen=True)
class Drafts:
    """Speculation during the load.

    Attributes:
        num_drafts: drafts verified, one a sequence and step.
        num_tokens, num_accepted: tokens verified and accepted.
        accepted_at: of the drafts, the part whose token at each position was accepted.
        tokens_per_step: tokens that a step gave a decoding sequence, steps without drafts included, the
            mean; None: not known.
        chosen: draft tokens that were verified with a decoding sequence in a step, 0 included, the mean;
            None: not known.
    """

    num_drafts: int
    num_tokens: int
    num_accepted: int
    accepted_at: tuple[float, ...]
    tokens_per_step: float | None = None
    chosen: float | None = None


@dataclass(frozen=True)
class Watched:
    """The server's metrics during the load.

    Attributes:
        kv_use: seconds since the load began, and the used part of the KV pool, 0 to 1.
        running: the same, and how many requests ran.
        batch_sizes: of the load's steps; None: not known.
        drafts: None: none were verified.
    """

    kv_use: tuple[tuple[float, float], ...] = ()
    running: tuple[tuple[float, float], ...] = ()
    batch_sizes: Histogram | None = None
    drafts: Drafts | None = None


@dataclass
class MetricsWatch:
    """Looks at `/metrics` again and again. The texts are read when the load is over: reading them takes
    time that would be measured as the server's.

    Attributes:
        http: to the server.
    """

    http: httpx.AsyncClient
    _looks: list[tuple[float, list[str]]] = field(default_factory=list)

    async def look(self) -> None:
        """Adds a look at `/metrics`, if it answers."""
        asked = time.perf_counter()  # however long the answer takes, it is not newer than it says
        try:
            response = await self.http.get("/metrics", timeout=5.0)
        except httpx.HTTPError:
            return
        if response.status_code == httpx.codes.OK:
            lines = [line for line in response.text.splitlines() if line.startswith(_WANTED)]
            if lines:
                self._looks.append((asked, lines))

    async def look_afresh(self) -> None:
        """Adds numbers that were made after this moment, as far as the server can be made out."""
        asked = time.perf_counter()
        await self.look()
        while self._looks and time.perf_counter() < asked + FRESH_S:
            when, samples = _read(*self._looks[-1])
            if _total(samples, _AGE) is None or when > asked:
                return
            self._looks.pop()
            await asyncio.sleep(0.1)
            await self.look()

    async def watch(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()

    def result(self, start: float, duration_s: float) -> Watched:
        """The metrics of all looks. The first is from before the load, the last from after it.

        Args:
            start: when the load began, by `time.perf_counter`.
            duration_s: how long it took.
        """
        looks = [_read(when - start, lines) for when, lines in self._looks]
        during = [look for look in looks if 0 <= look[0] <= duration_s]
        running = _series(during, _RUNNING)
        return Watched(
            kv_use=_series(during, _KV_USE),
            running=running,
            batch_sizes=_batch_sizes(looks) or _sampled([value for _, value in running]),
            drafts=_drafts(looks),
        )


Look = tuple[float, Sequence[Sample]]
"""When the numbers were made, in seconds, and the numbers."""


def _read(when: float, lines: Sequence[str]) -> Look:
    text = "\n".join(lines) + "\n"
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    age = _total(samples, _AGE)
    return (when - age if age is not None and age == age else when), samples


def _series(looks: Sequence[Look], names: Sequence[str]) -> tuple[tuple[float, float], ...]:
    """One point for each time that the server made the numbers anew."""
    points: list[tuple[float, float]] = []
    for when, samples in looks:
        value = _total(samples, names)
        if value is not None and (not points or when > points[-1][0] + PERIOD_S / 5):
            points.append((when, value))
    return tuple(points)


def _total(samples: Sequence[Sample], names: Sequence[str]) -> float | None:
    """Over all label values of the first metric of these names that is there."""
    for name in names:
        for prefix in _PREFIXES:
            found = [sample.value for sample in samples if sample.name == prefix + name]
            if found:
                return sum(found)
    return None


def _batch_sizes(looks: Sequence[Look]) -> Histogram | None:
    """The engine's own histogram, the last look less the first."""
    if len(looks) < 2:
        return None
    before, after = _cumulative(looks[0][1]), _cumulative(looks[-1][1])
    bounds = sorted(after)
    counts = [after[bound] - before.get(bound, 0.0) for bound in bounds]
    if not counts or counts[-1] <= 0:
        return None
    bins = []
    for (low, below), (high, count) in pairwise([(0.0, 0.0), *zip(bounds, counts, strict=True)]):
        last = None if high == float("inf") else int(high)
        bins.append((int(low) + 1, last, count - below))
    return Histogram("steps", tuple(bins))


def _drafts(looks: Sequence[Look]) -> Drafts | None:
    """The counters of the last look less those of the first."""
    if len(looks) < 2:
        return None

    def counted(name: str) -> float:
        first, last = (_total(look[1], (_DRAFTS + name,)) for look in (looks[0], looks[-1]))
        return (last or 0.0) - (first or 0.0)

    def mean(name: str) -> float | None:
        count = counted(f"{name}_count")
        return counted(f"{name}_sum") / count if count else None

    num_drafts = counted("num_drafts_total")
    if num_drafts <= 0:
        return None
    before, after = (_by_position(look[1]) for look in (looks[0], looks[-1]))
    return Drafts(
        num_drafts=int(num_drafts),
        num_tokens=int(counted("num_draft_tokens_total")),
        num_accepted=int(counted("num_accepted_tokens_total")),
        accepted_at=tuple(
            (count - before.get(position, 0.0)) / num_drafts
            for position, count in sorted(after.items())
        ),
        tokens_per_step=mean("tokens_per_step"),
        chosen=mean("chosen_tokens"),
    )


def _by_position(samples: Sequence[Sample]) -> dict[int, float]:
    """Accepted tokens by position."""
    for prefix in _PREFIXES:
        name = f"{prefix}{_DRAFTS}num_accepted_tokens_per_pos_total"
        found: dict[int, float] = {}
        for sample in samples:
            if sample.name == name:
                position = int(sample.labels["position"])
                found[position] = found.get(position, 0.0) + sample.value
        if found:
            return found
    return {}


def _cumulative(samples: Sequence[Sample]) -> dict[float, float]:
    totals: dict[float, float] = {}
    for sample in samples:
        if sample.name in (prefix + name for prefix in _PREFIXES for name in _STEPS):
            bound = float(sample.labels["le"])
            totals[bound] = totals.get(bound, 0.0) + sample.value
    return totals


def _sampled(running: Sequence[float]) -> Histogram | None:
    """For engines without such a histogram: the number of running requests at each look."""
    bins: list[tuple[int, int | None, float]] = []
    low = 1
    while any(value >= low for value in running):
        high = 2 * (low - 1) or 1
        bins.append((low, high, float(sum(low <= value <= high for value in running))))
        low = high + 1
    return Histogram("samples", tuple(bins)) if bins else None
