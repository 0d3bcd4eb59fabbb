"""Policies in virtual time, over one trace at several loads."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from plots import Panel, line_panel
from replay import blocks_of, optimum, pool_of
from report import markdown
from simulation import (
    BEGIN_S,
    BLOCK_BYTES,
    StepCost,
    max_tokens,
    measured_cost,
    simulate,
    summary,
)
from thin_model import write_thin_model
from traces import TraceRequest, Workload, make_trace

COST = Path(__file__).parent / "results" / "engine.json"
POLICIES = ("fcfs", "priority", "prefix_aware", "fair", "reserve", "shortest")
BLOCK_SIZE = 16
SHOWN = {
    "tokens/s": "tokens_per_s",
    "TTFT mean, s": "ttft_mean_s",
    "p50": "ttft_p50_s",
    "p99": "ttft_p99_s",
    "end mean, s": "end_mean_s",
    "p50 ": "end_p50_s",
    "p99 ": "end_p99_s",
    "urgent TTFT mean, s": "urgent_ttft_mean_s",
    " p99": "urgent_ttft_p99_s",
    "hit rate": "hit_rate",
    "preemptions": "preemptions",
    "fairness": "fairness",
}
"""Columns of a table to figures of a run."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of trace and engine.

    Attributes:
        kind, num_requests, scale, think_s, seed: of the trace.
        loads: requests' work a second, by what the engine could do at most.
        pool: KV blocks, as a part of the trace's distinct blocks.
        max_num_seqs, max_num_batched_tokens: of the engine.
    """

    kind: str = "mix"
    num_requests: int = 1000
    scale: float = 0.5
    think_s: float = 8.0
    seed: int = 0
    loads: tuple[float, ...] = (0.5, 0.75, 1.0, 1.5)
    pool: float = 0.25
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512


FULL = Sizes()
TINY = Sizes(num_requests=12, scale=0.1, think_s=0.1, loads=(0.7, 1.1), pool=0.5, max_num_seqs=4)


def measure(sizes: Sizes, policies: Sequence[str]) -> dict[str, Any]:
    """Figures of each policy at each load."""
    cost = measured_cost(COST)
    workload = Workload(sizes.num_requests, scale=sizes.scale, think_s=sizes.think_s)
    capacity = 1 / _work_s(make_trace(sizes.kind, sizes.seed, workload), cost, sizes)
    loads: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_thin_model(Path(folder) / "thin")
        for load in sizes.loads:
            trace = make_trace(sizes.kind, sizes.seed, replace(workload, rate=load * capacity))
            loads[str(load)] = {}
            for policy in policies:
                finished = simulate(trace, _config(model, policy, trace, sizes), cost)
                figures = summary(trace, finished, BEGIN_S, cost)
                loads[str(load)][policy] = figures
                print(load, policy, figures, file=sys.stderr)
    requests_per_s = round(capacity, 3)
    return {
        "sizes": asdict(sizes),
        "cost": asdict(cost),
        "requests_per_s": requests_per_s,
        "loads": loads,
    }


def table(result: dict[str, Any]) -> str:
    """The Markdown table of a result, at the load next to 1."""
    load = min(result["loads"], key=lambda load: abs(float(load) - 1.0))
    sizes, cost = result["sizes"], result["cost"]
    caption = (
        f"Virtual time: {sizes['num_requests']} requests of `{sizes['kind']}` at load {load}, where 1 is"
        f" {result['requests_per_s']:.2f} requests a second; a pool of {sizes['pool']:.0%} of the"
        f" trace's distinct blocks, {sizes['max_num_seqs']} sequences and"
        f" {sizes['max_num_batched_tokens']} tokens a step. A step takes"
        f" {1e3 * cost['fixed_s']:.1f} ms, {1e3 * cost['prefill_s']:.2f} ms a prompt token and"
        f" {1e3 * cost['decode_s']:.2f} ms a decoding sequence. Fairness is Jain's index of the"
        " tenants' mean slowdowns; a fifth of the sessions is urgent. Data:"
        " `results/schedulers_virtual.json`."
    )
    return f"{policy_table(result['loads'][load])}\n\n{caption}"


def policy_table(policies: dict[str, dict[str, float]]) -> str:
    """The Markdown table of figures by policy."""
    rows = [
        [policy, *(_shown(key, figures[key]) for key in SHOWN.values())]
        for policy, figures in policies.items()
    ]
    return markdown(["policy", *(head.strip() for head in SHOWN)], rows)


def panels(result: dict[str, Any]) -> list[Panel]:
    """A line a policy, by load."""
    figures = {
        "ttft_mean_s": ("mean time to the first token", "seconds"),
        "ttft_p99_s": ("its 99th percentile", "seconds"),
        "end_mean_s": ("mean time to the end", "seconds"),
        "end_p99_s": ("its 99th percentile", "seconds"),
        "urgent_ttft_p99_s": ("urgent requests, 99th percentile to the first token", "seconds"),
        "tokens_per_s": ("throughput", "tokens/s"),
        "hit_rate": ("hit rate", "part of prompt tokens"),
        "fairness": ("fairness between tenants", "Jain's index"),
    }
    policies = next(iter(result["loads"].values()))
    drawn = []
    for key, (title, label) in figures.items():
        lines = {
            policy: [(float(load), run[policy][key]) for load, run in result["loads"].items()]
            for policy in policies
        }
        drawn.append(line_panel(title, ("load", label), lines))
    return drawn


def _work_s(trace: Sequence[TraceRequest], cost: StepCost, sizes: Sizes) -> float:
    """Mean seconds of a request among as many as run at once, when all hits that can be are."""
    hits = optimum(blocks_of(trace, BLOCK_SIZE), BLOCK_SIZE)
    num_prefill = sum(map(len, (request.prompt for request in trace))) - sum(hits)
    num_decode = sum(len(request.answer) for request in trace)
    steps_s = cost.fixed_s * (
        num_decode / sizes.max_num_seqs + num_prefill / sizes.max_num_batched_tokens
    )
    return (cost.prefill_s * num_prefill + cost.decode_s * num_decode + steps_s) / len(trace)


def _config(
    model: Path, policy: str, trace: Sequence[TraceRequest], sizes: Sizes
) -> dict[str, Any]:
    longest = max(len(request.prompt) + max_tokens(request) for request in trace) + 1
    num_blocks = max(pool_of(blocks_of(trace, BLOCK_SIZE), sizes.pool), -(-longest // BLOCK_SIZE))
    return {
        "model": str(model),
        "attention": "torch",  # whose blocks are no larger than their elements
        "prefix_cache": "on",
        "max_model_len": longest,
        "kv_cache": {"block_size": BLOCK_SIZE, "memory": (num_blocks + 1) * BLOCK_BYTES},
        "scheduler": {
            "name": policy,
            "max_num_seqs": sizes.max_num_seqs,
            "max_num_batched_tokens": sizes.max_num_batched_tokens,
        },
    }


def _shown(key: str, value: float) -> str:
    if key == "hit_rate":
        return f"{value:.1%}"
    return f"{value:.0f}" if key == "preemptions" else f"{value:.3g}"
