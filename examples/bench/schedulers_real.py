"""Policies with a real model: the same trace for each, in turns."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plots import Panel, bar_panel
from schedulers_virtual import policy_table
from simulation import Finished, measured_cost, summary
from traces import TraceRequest, Workload, make_trace

from pegboard import Engine, SamplingParams

COST = Path(__file__).parent / "results" / "engine.json"
POLICIES = ("fcfs", "prefix_aware", "priority")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of trace and engine.

    Attributes:
        kind, num_requests, rate, scale, think_s, max_len: of the trace.
        memory: of the KV pool.
        max_num_seqs, max_num_batched_tokens: of the engine.
        rounds: of all policies, with other tokens in each.
    """

    kind: str = "mix"
    num_requests: int = 64
    rate: float = 4.0
    scale: float = 0.5
    think_s: float = 4.0
    max_len: int = 2048
    memory: str = "512MiB"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    rounds: int = 3


FULL = Sizes()
TINY = Sizes(
    num_requests=4, rate=50.0, scale=0.04, think_s=0.05, max_len=400, memory="4MiB", rounds=1
)


def measure(model: str, sizes: Sizes, policies: Sequence[str]) -> dict[str, Any]:
    """Figures of each policy, medians of the rounds."""
    engines: dict[str, tuple[Engine, Finished]] = {}
    runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
    cost = measured_cost(COST)
    try:
        for policy in policies:
            finished = Finished()
            config = _config(model, policy, sizes)
            engines[policy] = Engine(config, observer=[finished]), finished
        for number in range(sizes.rounds):
            turn = number % len(policies)
            for policy in (*policies[turn:], *policies[:turn]):
                engine, finished = engines[policy]
                trace = make_trace(sizes.kind, number, _workload(engine, sizes))
                begin_s = _run(engine, trace)
                sequences = [finished.sequences[str(index)] for index in range(len(trace))]
                runs[policy].append(summary(trace, sequences, begin_s, cost))
                print(number, policy, runs[policy][-1], file=sys.stderr)
    finally:
        for engine, _ in engines.values():
            engine.close()
    return {"sizes": asdict(sizes), "model": Path(model).name, "policies": runs}


def table(result: dict[str, Any]) -> str:
    """The Markdown table of a result."""
    sizes = result["sizes"]
    caption = (
        f"{result['model']}, {sizes['num_requests']} requests of `{sizes['kind']}`,"
        f" {sizes['rate']} a second, a KV pool of {sizes['memory']}, {sizes['max_num_seqs']} sequences"
        f" and {sizes['max_num_batched_tokens']} tokens a step; medians of {sizes['rounds']} rounds;"
        f" {result['cpu']}, pegboard {result['pegboard']}; load of the machine before it:"
        f" {result['load_before']}. Data: `results/schedulers_real.json`."
    )
    return f"{policy_table(_medians(result))}\n\n{caption}"


def panels(result: dict[str, Any]) -> list[Panel]:
    """Bars, a policy each."""
    medians = _medians(result)
    figures = {
        "ttft_mean_s": "mean time to the first token",
        "ttft_p99_s": "its 99th percentile",
        "urgent_ttft_mean_s": "urgent requests, mean time to the first token",
        "end_p99_s": "99th percentile to the end",
    }
    return [
        bar_panel(title, "seconds", {policy: run[key] for policy, run in medians.items()})
        for key, title in figures.items()
    ]


def _medians(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        policy: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for policy, runs in result["policies"].items()
    }


def _workload(engine: Engine, sizes: Sizes) -> Workload:
    return Workload(
        num_requests=sizes.num_requests,
        rate=sizes.rate,
        think_s=sizes.think_s,
        vocab_size=engine.prepared.composition.target.shape.vocab_size,
        max_len=sizes.max_len,
        scale=sizes.scale,
    )


def _config(model: str, policy: str, sizes: Sizes) -> dict[str, Any]:
    return {
        "model": model,
        "prefix_cache": "on",
        "max_model_len": sizes.max_len + 1,
        "kv_cache": {"memory": sizes.memory},
        "scheduler": {
            "name": policy,
            "max_num_seqs": sizes.max_num_seqs,
            "max_num_batched_tokens": sizes.max_num_batched_tokens,
        },
    }


def _run(engine: Engine, trace: Sequence[TraceRequest]) -> float:
    """Submits each request at its time and steps until all have ended; returns when it began."""
    begin_s = time.monotonic()
    waiting = list(enumerate(trace))[::-1]
    while waiting or engine.has_work():
        now_s = time.monotonic() - begin_s
        while waiting and waiting[-1][1].arrival_s <= now_s:
            number, request = waiting.pop()
            num_tokens = len(request.answer)
            engine.submit(
                request.prompt.tolist(),
                SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
                request_id=str(number),
                priority=request.priority,
                tenant=request.tenant,
            )
        if engine.has_work():
            engine.step()
        elif waiting:
            time.sleep(max(0.0, waiting[-1][1].arrival_s - now_s))
    return begin_s
