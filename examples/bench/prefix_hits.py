"""Hit rates on traces: what the cache hits with each way of eviction, beside what it could."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from host_parts import make_parts
from plots import Panel, line_panel
from replay import Blocks, belady, blocks_of, hit_rate, num_distinct, optimum, pool_of, replay
from report import markdown
from traces import KINDS, TraceRequest, Workload, make_trace

CACHE = "trie"
EVICTIONS = ("lru", "priority")
BELADY = "Belady's"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the traces, and pools as parts of a trace's distinct blocks."""

    num_requests: int = 1000
    scale: float = 1.0
    pools: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75)
    block_size: int = 16
    seed: int = 0


FULL = Sizes()
TINY = Sizes(num_requests=30, scale=0.1)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Hit rates, in tokens, of every kind of trace."""
    cases = {}
    workload = Workload(num_requests=sizes.num_requests, scale=sizes.scale)
    for kind in KINDS:
        cases[kind] = _case(make_trace(kind, sizes.seed, workload), sizes)
        print(kind, cases[kind], file=sys.stderr)
    return {"sizes": asdict(sizes), "cases": cases}


def _case(trace: Sequence[TraceRequest], sizes: Sizes) -> dict[str, Any]:
    requests = blocks_of(trace, sizes.block_size)
    unbounded = sum(request.num_blocks for request in requests)
    return {
        "prompt_tokens": sum(len(request.prompt) for request in trace),
        "distinct_blocks": num_distinct(requests),
        "optimum": round(hit_rate(trace, optimum(requests, sizes.block_size)), 5),
        "unbounded": _caches(trace, unbounded, sizes),
        "pools": {
            str(fraction): _pool(trace, requests, pool_of(requests, fraction), sizes)
            for fraction in sizes.pools
        },
    }


def _pool(
    trace: Sequence[TraceRequest], requests: Sequence[Blocks], num_blocks: int, sizes: Sizes
) -> dict[str, Any]:
    best = hit_rate(trace, belady(requests, num_blocks, sizes.block_size))
    rates = {BELADY: {"all": round(best, 5)}, **_caches(trace, num_blocks, sizes)}
    return {"num_blocks": num_blocks, "rates": rates}


def _caches(
    trace: Sequence[TraceRequest], num_blocks: int, sizes: Sizes
) -> dict[str, dict[str, float]]:
    """Hit rates of all requests and of the urgent ones, by the way of eviction."""
    rates = {}
    for eviction in EVICTIONS:
        cache = {"name": CACHE, "options": {"eviction": eviction}}
        make = make_parts(cache, sizes.block_size)
        hits = replay(trace, make, num_blocks, sizes.block_size)
        of_all, of_urgent = hit_rate(trace, hits), hit_rate(trace, hits, priority=0)
        rates[eviction] = {"all": round(of_all, 5), "urgent": round(of_urgent, 5)}
    return rates


def table(result: dict[str, Any]) -> str:
    """The Markdown table of a result."""
    fractions = result["sizes"]["pools"]
    head = ["trace", "distinct blocks", "optimum", "unbounded"]
    for fraction in fractions:
        head += [f"{fraction:.0%}: Belady's", *EVICTIONS]
    rows = []
    for kind, case in result["cases"].items():
        unbounded = [f"{case['unbounded'][eviction]['all']:.1%}" for eviction in EVICTIONS]
        cells = [kind, f"{case['distinct_blocks']:,}", f"{case['optimum']:.1%}"]
        cells.append(", ".join(unbounded))
        for fraction in fractions:
            rates = case["pools"][str(fraction)]["rates"]
            best = rates[BELADY]["all"]
            cells.append(f"{best:.1%}")
            cells += [_beside(rates[eviction], best) for eviction in EVICTIONS]
        rows.append(cells)
    below = (
        f"Prompt tokens that were cached, of {result['sizes']['num_requests']} requests, one after the"
        " other; pools hold this part of the trace's distinct blocks. In parentheses the ratio to"
        " Belady's, and the hit rate of urgent requests (a fifth). Data: `results/prefix_hits.json`."
    )
    return f"{markdown(head, rows)}\n\n{below}"


def panels(result: dict[str, Any]) -> list[Panel]:
    """A panel a trace: hit rate by the pool's size."""
    labels = "pool, percent of the distinct blocks", "hit rate, percent of prompt tokens"
    figures = []
    for kind, case in result["cases"].items():
        pools = [(100 * float(fraction), pool) for fraction, pool in case["pools"].items()]
        lines = {
            name: [
                *((size, 100 * pool["rates"][name]["all"]) for size, pool in pools),
                (100.0, 100 * case["optimum"]),
            ]
            for name in (BELADY, *EVICTIONS)
        }
        for eviction in EVICTIONS:
            lines[eviction][-1] = (100.0, 100 * case["unbounded"][eviction]["all"])
        figures.append(line_panel(kind, labels, lines, high=100.0))
    return figures


def _beside(rates: dict[str, float], best: float) -> str:
    ratio = rates["all"] / best if best else 1.0
    return f"{rates['all']:.1%} ({ratio:.3f}; {rates['urgent']:.1%})"
