"""A result as a person reads it, in words that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "end to end"}
"""The latencies by their short names, which are those of vLLM's results, with their names for people, in
the order in which they are shown: time to first token; time per output token after the first, a request's
mean; inter-token latency, in goodput a request's worst; end-to-end latency."""


def summary(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines for a terminal."""
    for name, value in facts(found):
        yield f"{name:<18}{value}"
    yield ""
    columns = statistics_of(found)
    yield f"{'milliseconds':<18}" + "".join(f"{column:>11}" for column in columns)
    for latency, values in latency_rows(found):
        yield f"{latency:<18}" + "".join(f"{value:>11}" for value in values)
    for kind, failure in found["failures"].items():
        yield f"failed: {failure['count']} x {kind}: {failure['message']}"
    yield from (f"note: {note}" for note in found["notes"])


def facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines of the summary: a name, and its value with its unit."""
    yield "model", found["model_id"]
    yield "load", load(found)
    yield "requests", requests(found)
    yield "duration", f"{found['duration']:.2f} s"
    yield "request rate", f"{found['request_throughput']:.2f} completed/s"
    if found["request_goodput"] is not None:
        yield "goodput", f"{found['request_goodput']:.2f} requests/s within {targets(found)}"
    per_s = f"{found['output_throughput']:.1f} tokens/s"
    yield "output", f"{per_s}, at most {found['max_output_tokens_per_s']:.0f} in a second"
    yield "input and output", f"{found['total_token_throughput']:.1f} tokens/s"
    mean = " + ".join(_mean(found, key) for key in ("total_input_tokens", "total_output_tokens"))
    yield "tokens a request", f"{mean} (input + output, mean)"
    yield "at once", f"at most {found['max_concurrent_requests']} requests"
    if "spec_decode_num_drafts" in found:
        yield from _drafts(found)


def _drafts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Speculation: what a step brought, and how many drafts were right so far."""
    drafts, tokens = found["spec_decode_num_drafts"], found["spec_decode_draft_tokens"]
    parts = [f"{drafts} verified, of {tokens / drafts:.2f} tokens (mean)"]
    chosen, gained = found["spec_decode_chosen_tokens"], found["spec_decode_tokens_per_step"]
    if chosen is not None and gained is not None:
        parts.append(f"{chosen:.2f} a step and sequence, which gave {gained:.2f} tokens")
    yield "drafts", "; ".join(parts)
    rates = [f"{100 * rate:.0f}" for rate in found["spec_decode_per_position_acceptance_rates"]]
    if rates:
        yield "accepted by place", f"{' '.join(rates)} % of drafts"


def load(found: Mapping[str, Any]) -> str:
    """The load, in words."""
    places, rate = found["max_concurrency"], found["request_rate"]
    if rate == "inf":
        return "all requests at once" if places is None else f"{places} clients, one after another"
    kind = {1.0: "Poisson", "inf": "evenly"}.get(
        found["burstiness"], f"gamma of shape {found['burstiness']}"
    )
    most = "" if places is None else f", at most {places} at once"
    return f"{rate:g} requests/s, {kind}{most}"


def requests(found: Mapping[str, Any]) -> str:
    """The ends of requests, in words."""
    parts = [f"{found['completed']} completed", f"{found['failed']} failed"]
    if found["interrupted"]:
        parts.append(f"interrupted with {found['open']} open and {found['unsent']} not sent")
    return ", ".join(parts)


def targets(found: Mapping[str, Any]) -> str:
    """The targets of a good request, in words."""
    return ", ".join(f"{NAMES[k]} {ms:g} ms" for k, ms in found["goodput_targets_ms"].items())


def statistics_of(found: Mapping[str, Any]) -> list[str]:
    """The statistics of each latency, in the order in which they are shown."""
    percentiles = [
        key.removesuffix("_ttft_ms")
        for key in found
        if key.startswith("p") and key.endswith("_ttft_ms")
    ]
    return ["mean", *percentiles, "max"]


def latency_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Each latency with its statistics, in milliseconds."""
    for latency, name in NAMES.items():
        values = [found[f"{statistic}_{latency}_ms"] for statistic in statistics_of(found)]
        yield name, ["-" if value is None else _number(value) for value in values]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _mean(found: Mapping[str, Any], key: str) -> str:
    return f"{found[key] / found['completed']:.0f}" if found["completed"] else "-"
