"""The worth of paging and continuous batching, by the classical design on this very engine.

Memory: requests of mixed lengths wait in a queue that never runs dry, and the pool is the same. How
much of the KV that is held or reserved has a token in it, and how many sequences run at once: with the
allocator `contiguous` and with `paged`. The engine runs in virtual time, without a model.

Speed: the same requests with the scheduler `static` and with `fcfs`, on the model of
`dequantized.yaml`. The engine computes no row that has ended: what padding would have added to static
batches is counted from the lengths.

Writes a JSON file, a plot, and the tables of this folder's README. A part leaves the other's results as
they were.

    python examples/bench/bench_classics.py
    python examples/bench/bench_classics.py --part memory --requests 4000
    python examples/bench/bench_classics.py --part speed --rounds 7 --set threads=1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from plots import bar_panel, line_panel, write_plot
from pool_use import (
    BLOCK_SIZE,
    CHAT_LENGTHS,
    MAX_MODEL_LEN,
    POOL_SEQUENCES,
    chats,
    mean_lengths,
    memory,
    thinned,
)
from report import circumstances, markdown, write_table
from thin_model import write_thin_model
from traces import TraceRequest, Workload, make_trace

from pegboard import Engine, SamplingParams, __version__
from pegboard.config import load_config

HERE = Path(__file__).parent
CONFIG = HERE / "dequantized.yaml"
ALLOCATORS = ("contiguous", "paged")
SCHEDULERS = ("static", "fcfs")


def speed(engine: Engine, requests: Sequence[TraceRequest]) -> dict[str, Any]:
    """Runs all requests, and returns tokens a second and who began together."""
    numbers: dict[str, int] = {}
    began = time.perf_counter()
    for request in requests:
        params = SamplingParams(temperature=0.0, max_tokens=len(request.answer), ignore_eos=True)
        numbers[engine.submit(request.prompt.tolist(), params).request_id] = len(numbers)
    going: set[int] = set()
    batches: list[list[int]] = []
    timeline: list[tuple[float, int]] = []
    num_tokens = 0
    while engine.has_work():
        deltas = engine.step()
        timeline.append((time.perf_counter() - began, len(deltas)))
        seen = {numbers[delta.request_id] for delta in deltas}
        known = {number for batch in batches for number in batch}
        if not going:
            batches.append([])
        batches[-1] += sorted(seen - known)
        going |= seen
        going -= {numbers[delta.request_id] for delta in deltas if delta.finish_reason}
        num_tokens += sum(len(delta.token_ids) for delta in deltas)
    seconds = time.perf_counter() - began
    return {
        "tokens_per_s": round(num_tokens / seconds, 2),
        "batches": batches,
        "timeline": thinned(*np.array(timeline).T),
    }


def padding(requests: Sequence[TraceRequest], batches: Sequence[Sequence[int]]) -> float:
    """Part of the tokens that static batches compute in vain if each row is padded to the longest
    prompt of its batch, and runs on until the longest answer is done."""
    real = padded = 0
    for batch in batches:
        lengths = [(len(requests[n].prompt), len(requests[n].answer)) for n in batch]
        real += sum(map(sum, lengths))
        padded += len(batch) * sum(max(column) for column in zip(*lengths, strict=True))
    return 1.0 - real / padded


def compare_speed(options: argparse.Namespace) -> dict[str, Any]:
    """Both schedulers on the same requests, in turn in each round."""
    requests = chats(options.speed_requests, options.speed_lengths, options.speed_max_len, seed=1)
    engines = {}
    for scheduler in SCHEDULERS:
        sets = ["prefix_cache=none", f"scheduler.name={scheduler}"]
        sets += [f"scheduler.max_num_seqs={options.rows}", f"max_model_len={options.speed_max_len}"]
        engines[scheduler] = Engine(load_config(options.config, sets=[*sets, *options.set]))
    runs: dict[str, list[dict[str, Any]]] = {scheduler: [] for scheduler in SCHEDULERS}
    try:
        for engine in engines.values():
            speed(engine, requests[:2])  # what is set up at first use is not counted
        for number in range(options.rounds):
            for scheduler in SCHEDULERS[:: -1 if number % 2 else 1]:
                runs[scheduler].append(speed(engines[scheduler], requests))
                rate = runs[scheduler][-1]["tokens_per_s"]
                print(f"round {number + 1}: {scheduler} {rate}", file=sys.stderr)
    finally:
        for engine in engines.values():
            engine.close()
    return {
        "config": options.config.name,
        "set": options.set,
        "requests": len(requests),
        "mean_lengths": mean_lengths(requests),
        "rows": options.rows,
        "tokens_per_s": {name: [run["tokens_per_s"] for run in runs[name]] for name in SCHEDULERS},
        "padding_wasted": round(padding(requests, runs["static"][-1]["batches"]), 4),
        "timeline": {name: runs[name][-1]["timeline"] for name in SCHEDULERS},
    }


def memory_table(result: dict[str, Any]) -> str:
    """The Markdown table of the part `memory`."""
    head = [
        "requests, mean prompt and answer",
        "allocator",
        "of the KV set aside, holds tokens",
        "of the pool",
    ]
    head += ["sequences at once", "at most", "preempted"]
    rows = []
    for trace, case in result["traces"].items():
        for allocator in ALLOCATORS:
            run = case[allocator]
            shares = [f"{100 * run[key]:.1f}%" for key in ("filled_of_taken", "filled_of_pool")]
            counts = [f"{run[key]}" for key in ("running_mean", "running_most", "preempted")]
            lengths = " and ".join(f"{length:.0f}" for length in case["mean_lengths"])
            rows.append([f"{trace}, {lengths} tokens", allocator, *shares, *counts])
    rows.append(["the field's claims", "contiguous", "20 to 40%", "", "", "", ""])
    rows.append(["", "paged", "more than 90%", "", "", "", ""])
    return "\n".join(
        (
            "![Use of the KV pool, and sequences that run](results/classics_memory.svg)",
            "",
            markdown(head, rows),
            "",
            f"Means over virtual time while requests wait; {result['requests']} requests of each kind, "
            f"all there from the start; pools of {POOL_SEQUENCES} sequences of {MAX_MODEL_LEN} tokens, "
            f"blocks of {BLOCK_SIZE}; `fcfs`; {_where(result)}",
        )
    )


def speed_table(result: dict[str, Any]) -> str:
    """The Markdown table of the part `speed`."""
    rates = result["tokens_per_s"]
    ratios = [fcfs / static for static, fcfs in zip(rates["static"], rates["fcfs"], strict=True)]
    cells = [f"{statistics.median(rates[name]):.1f}" for name in SCHEDULERS]
    cells += [f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
    cells += ["2 to 4", f"{100 * result['padding_wasted']:.0f}%"]
    head = ["static, tokens/s", "fcfs, tokens/s", "ratio", "the field's claim"]
    settings = "".join(f", `--set {value}`" for value in result["set"])
    prompt, answer = (f"{length:.0f}" for length in result["mean_lengths"])
    return "\n".join(
        (
            "![Speed, and tokens of each step](results/classics_speed.svg)",
            "",
            markdown([*head, "padding would waste"], [cells]),
            "",
            f"{result['requests']} requests of log-normal lengths, prompts of {prompt} and answers of "
            f"{answer} tokens on average, {result['rows']} rows; medians of {len(ratios)} rounds, wall "
            f"time; `{result['config']}`{settings}; {_where(result)}",
        )
    )


def _where(result: dict[str, Any]) -> str:
    return (
        f"{result['cpu']}; pegboard {result['pegboard']}; load of the machine before it: "
        f"{result['load_before']:.1f}. Data: `results/classics.json`."
    )


def plot_memory(result: dict[str, Any], path: Path) -> None:
    """Tokens in the pool, and sequences that run, over virtual time, of each trace."""
    panels = []
    for trace, case in result["traces"].items():
        lines = {name: case[name]["timeline"] for name in ALLOCATORS}
        filled = {name: [(row[0], 100 * row[1]) for row in lines[name]] for name in ALLOCATORS}
        running = {name: [(row[0], row[2]) for row in lines[name]] for name in ALLOCATORS}
        labels = ("seconds, virtual", "% of the pool's slots with a token")
        panels.append(line_panel(trace, labels, filled, high=100.0))
        panels.append(line_panel(trace, (labels[0], "sequences that run"), running))
    write_plot(path, panels)


def plot_speed(result: dict[str, Any], path: Path) -> None:
    """Tokens a second, and tokens of each step over time."""
    rates = {name: statistics.median(result["tokens_per_s"][name]) for name in SCHEDULERS}
    lines = {name: [(row[0], row[1]) for row in result["timeline"][name]] for name in SCHEDULERS}
    steps = line_panel("Tokens of each step", ("seconds", "tokens"), lines)
    write_plot(path, [steps, bar_panel("Speed", "tokens/s", rates)])


def main() -> None:
    options = _options()
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    begun = {**circumstances(), "pegboard": __version__}
    if options.part in ("memory", "both"):
        traces = {
            "chats": chats(options.requests, CHAT_LENGTHS, MAX_MODEL_LEN, seed=0),
            "mix": make_trace(
                "mix", 0, Workload(num_requests=options.requests, max_len=MAX_MODEL_LEN - 1)
            ),
        }
        with tempfile.TemporaryDirectory() as folder:
            model = write_thin_model(Path(folder) / "thin")
            cases = {
                kind: {
                    "mean_lengths": mean_lengths(trace),
                    **{name: memory(trace, name, model) for name in ALLOCATORS},
                }
                for kind, trace in traces.items()
            }
        result["memory"] = {**begun, "requests": options.requests, "traces": cases}
    if options.part in ("speed", "both"):
        result["speed"] = {**begun, **compare_speed(options)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    _publish(result, options)


def _publish(result: dict[str, Any], options: argparse.Namespace) -> None:
    stem = options.out.with_suffix("")
    for part, plot, table in (
        ("memory", plot_memory, memory_table),
        ("speed", plot_speed, speed_table),
    ):
        if part in result:
            plot(result[part], Path(f"{stem}_{part}.svg"))
            write_table(options.page, f"bench_classics_{part}", table(result[part]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=("memory", "speed", "both"), default="both")
    parser.add_argument("--requests", type=int, default=2000, help="of the part `memory`, a trace")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the config")
    parser.add_argument("--speed-requests", type=int, default=128)
    parser.add_argument("--speed-lengths", type=float, nargs=2, default=(64.0, 96.0))
    parser.add_argument("--speed-max-len", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=16, help="sequences at once, part `speed`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "classics.json")
    parser.add_argument("--page", type=Path, default=HERE / "README.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
