"""From the clients' records to numbers, under the names of vLLM's `bench serve`.

Latencies count from a request's scheduled time. Each token counts when it arrives: where a chunk brings
several, the first of them waited since the chunk before, and the others 0 s. Where the server does not
say how many tokens a chunk has, gaps are between chunks, and `itl_per` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from pegboard.bench.exchange import Record
from pegboard.bench.server_metrics import Drafts, Watched

FINEST_S = 0.1
"""Shorter intervals of the output over time would show single tokens."""


@dataclass(frozen=True)
class Measured:
    """A run.

    Attributes:
        settings: of the measurement, by the names that the result gives them.
        records: of every request, in the order of their schedule.
        duration_s: from the first scheduled time to the last answer's end, or to the interruption.
        watched: what the server said meanwhile.
        goodput: latency's name to the most milliseconds that a good request has.
        percentiles: to give of each latency.
        notes: for reading the numbers.
    """

    settings: Mapping[str, Any]
    records: Sequence[Record]
    duration_s: float
    watched: Watched
    goodput: Mapping[str, float]
    percentiles: Sequence[float]
    interrupted: bool = False
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Latencies:
    """Latencies of one completed request, in seconds.

    Attributes:
        ttft, e2el: from the scheduled time to the first and the last token.
        itl: gaps between tokens; between chunks where their tokens are not known.
        tpot: the mean gap between tokens; None: there was one token.
    """

    ttft: float
    e2el: float
    itl: list[float]
    tpot: float | None

    def meets(self, targets: Mapping[str, float]) -> bool:
        """Whether no latency is over its target, in milliseconds."""
        worst = {
            "ttft": self.ttft,
            "e2el": self.e2el,
            "tpot": self.tpot or 0.0,
            "itl": max(self.itl, default=0.0),
        }
        return all(worst[name] * 1000 <= most for name, most in targets.items())


def latencies(record: Record) -> Latencies:
    """The latencies of a completed request."""
    times = token_times(record)
    first, last = times[0], times[-1]
    num_tokens = num_output_tokens(record)
    return Latencies(
        ttft=first - record.scheduled,
        e2el=last - record.scheduled,
        itl=[after - before for before, after in pairwise(times)],
        tpot=(last - first) / (num_tokens - 1) if num_tokens > 1 else None,
    )


def token_times(record: Record) -> list[float]:
    """When each token came; of chunks of unknown size, when each chunk came."""
    return [when for when, count in record.chunks for _ in range(1 if count is None else count)]


def num_output_tokens(record: Record) -> int:
    """The server's count; without one, the tokens that came."""
    counted = record.num_output_tokens
    return len(token_times(record)) if counted is None else counted


def counts_tokens(record: Record) -> bool:
    """Whether it is known when each token came."""
    return len(token_times(record)) == num_output_tokens(record)


def result(run: Measured) -> dict[str, Any]:
    """The run as plain values: seconds in lists, milliseconds where a name ends in `_ms`."""
    completed = [record for record in run.records if record.state == "completed"]
    each = [latencies(record) for record in completed]
    num_input = sum(record.num_input_tokens or 0 for record in completed)
    num_output = sum(map(num_output_tokens, completed))
    good = sum(one.meets(run.goodput) for one in each) if run.goodput else None
    states = Counter(record.state for record in run.records)
    pooled = {
        "ttft": [one.ttft for one in each],
        "tpot": [one.tpot for one in each if one.tpot is not None],
        "itl": [gap for one in each for gap in one.itl],
        "e2el": [one.e2el for one in each],
    }
    found: dict[str, Any] = {
        **run.settings,
        "duration": run.duration_s,
        "completed": len(completed),
        "failed": states["failed"],
        "interrupted": run.interrupted,
        "open": states["open"],
        "unsent": states["unsent"],
        "failures": _failures(run.records),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": _per_second(len(completed), run),
        "request_goodput": None if good is None else _per_second(good, run),
        "goodput_targets_ms": dict(run.goodput),
        "output_throughput": _per_second(num_output, run),
        "total_token_throughput": _per_second(num_input + num_output, run),
        "max_output_tokens_per_s": max(
            output_rates(run.records, run.duration_s, max(1, int(run.duration_s))), default=0.0
        ),
        "max_concurrent_requests": _most_open(run.records, run.duration_s),
        "itl_per": "token" if all(map(counts_tokens, completed)) else "chunk",
        "max_send_delay_ms": send_delay(run.records) * 1000,
    }
    for name, values in pooled.items():
        found |= statistics(name, values, run.percentiles)
    found["output_tokens_per_s"] = _over_time(run)
    return found | _of_each(run.records) | _watched(run.watched) | {"notes": list(run.notes)}


def statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, Any]:
    """Mean, median, deviation, percentiles and maximum in milliseconds; None without values."""
    wanted = {f"p{percentile:g}": percentile for percentile in percentiles}
    if not seconds:
        names = ("mean", "median", "std", "max", *wanted)
        return {f"{statistic}_{name}_ms": None for statistic in names}
    ms = np.array(seconds) * 1000
    found = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std(), "max": ms.max()}
    found |= {word: np.percentile(ms, percentile) for word, percentile in wanted.items()}
    return {f"{statistic}_{name}_ms": float(value) for statistic, value in found.items()}


def output_rates(records: Sequence[Record], duration_s: float, num_bins: int) -> list[float]:
    """Output tokens a second in each of so many equal parts of the run.

    Tokens of requests that failed or were interrupted are among them. Those of chunks of unknown size
    are shared out over the request's chunks.
    """
    totals, width_s = np.zeros(num_bins), duration_s / num_bins
    for record in records:
        unknown = [when for when, count in record.chunks if count is None]
        share = (record.num_output_tokens or len(unknown)) / len(unknown) if unknown else 0.0
        for when, count in record.chunks:
            totals[min(int(when / width_s), num_bins - 1)] += share if count is None else count
    rates: list[float] = (totals / width_s).tolist() if duration_s else []
    return rates


def _over_time(run: Measured) -> dict[str, Any]:
    """The rates of bins that are fine enough to see the run's course in."""
    num_bins = min(60, max(1, int(run.duration_s / FINEST_S)))
    rates = output_rates(run.records, run.duration_s, num_bins)
    return {"bin_s": run.duration_s / num_bins, "rates": rates}


def _per_second(count: int, run: Measured) -> float:
    return count / run.duration_s if run.duration_s else 0.0


def _failures(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Kind to how many there were, most first, and what was said first."""
    failures = [record.failure for record in records if record.failure is not None]
    said = {failure.kind: failure.message for failure in reversed(failures)}
    counts = Counter(failure.kind for failure in failures)
    return {kind: {"count": count, "message": said[kind]} for kind, count in counts.most_common()}


def _most_open(records: Sequence[Record], duration_s: float) -> int:
    """Most requests that were under way at a time."""
    changes = []
    for record in records:
        if record.sent is not None:
            ended = duration_s if record.ended is None else record.ended
            changes += [(record.sent, 1), (ended, -1)]
    return int(np.cumsum([0, *(change for _, change in sorted(changes))]).max())


def send_delay(records: Sequence[Record]) -> float:
    """Most seconds that a request was sent after it was due: waiting for a place, or a busy client."""
    return max((r.sent - r.scheduled for r in records if r.sent is not None), default=0.0)


def _of_each(records: Sequence[Record]) -> dict[str, Any]:
    """A list entry a request; null and empty where it was not completed."""
    each = [latencies(r) if r.state == "completed" else None for r in records]
    return {
        "input_lens": [record.num_input_tokens for record in records],
        "output_lens": [
            num_output_tokens(record) if one else 0
            for record, one in zip(records, each, strict=True)
        ],
        "ttfts": [one and one.ttft for one in each],
        "itls": [one.itl if one else [] for one in each],
        "e2els": [one and one.e2el for one in each],
        "scheduled_times": [record.scheduled for record in records],
        "start_times": [record.sent for record in records],
        "errors": [_error(record) for record in records],
    }


def _error(record: Record) -> str:
    if record.failure is not None:
        return f"{record.failure.kind}: {record.failure.message}"
    return "" if record.state == "completed" else f"interrupted while {record.state}"


def _watched(watched: Watched) -> dict[str, Any]:
    return {
        "kv_cache_usage": [{"time": when, "usage": value} for when, value in watched.kv_use],
        "num_requests_running": [{"time": t, "requests": value} for t, value in watched.running],
        "batch_sizes": msgspec.to_builtins(watched.batch_sizes),
        **(_drafts(watched.drafts) if watched.drafts is not None else {}),
    }


def _drafts(drafts: Drafts) -> dict[str, Any]:
    """Rates are of 100 where vLLM's are, and the others of 1."""
    return {
        "spec_decode_acceptance_rate": 100 * drafts.num_accepted / max(1, drafts.num_tokens),
        "spec_decode_acceptance_length": 1 + drafts.num_accepted / drafts.num_drafts,
        "spec_decode_num_drafts": drafts.num_drafts,
        "spec_decode_draft_tokens": drafts.num_tokens,
        "spec_decode_accepted_tokens": drafts.num_accepted,
        "spec_decode_per_position_acceptance_rates": list(drafts.accepted_at),
        "spec_decode_tokens_per_step": drafts.tokens_per_step,
        "spec_decode_chosen_tokens": drafts.chosen,
    }
