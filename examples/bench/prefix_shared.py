"""Requests that share a system prompt: what the cache saves, and a peer with a cache of its own.

Each engine is a process of its own and loads once. In each round all of them get one trace, in an
order that turns, and the next round's trace has other tokens: prefixes are shared within a round alone.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peer_process import PeerProcess
from plots import Panel, bar_panel
from report import markdown
from traces import FIRST_ID, TraceRequest, write_trace

OFF, ON = "pegboard, cache off", "pegboard"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the trace, in tokens; and rounds."""

    num_requests: int = 64
    num_shared: int = 1000
    num_own: int = 50
    num_generated: int = 32
    rounds: int = 3


FULL = Sizes()
TINY = Sizes(num_requests=3, num_shared=40, num_own=8, num_generated=3, rounds=1)


def measure(model: Path, sizes: Sizes, peers: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Runs of each engine, one a round.

    Args:
        model: a folder that all engines read.
        sizes: of the trace.
        peers: names, and the interpreters of their environments.
    """
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        traces = [Path(folder) / f"{number}.jsonl" for number in range(sizes.rounds)]
        for number, path in enumerate(traces):
            write_trace(path, make_requests(number, sizes, vocab_size))
        common = ["--model", str(model), "--dtype", "float32", "--trace", str(traces[0])]
        engines = [
            PeerProcess(OFF, sys.executable, "pegboard", common),
            PeerProcess(ON, sys.executable, "pegboard", [*common, "--prefix-cache"]),
            *(
                PeerProcess(name, python, name, [*common, "--prefix-cache"])
                for name, python in peers
            ),
        ]
        runs: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
        for number, path in enumerate(traces):
            turn = number % len(engines)
            for engine in engines[turn:] + engines[:turn]:
                run = engine.ask({"trace": str(path)})
                runs[engine.name].append(run)
                print(number, engine.name, f"{run['total_s']:.2f} s", file=sys.stderr)
        for engine in engines:
            engine.close()
    return {"sizes": asdict(sizes), "model": model.name, "runs": runs}


def make_requests(seed: int, sizes: Sizes, vocab_size: int) -> list[TraceRequest]:
    """Requests that arrive at once, and begin with the same tokens."""
    random = np.random.default_rng(seed)

    def text(num_tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return random.integers(FIRST_ID, vocab_size, num_tokens, dtype=np.int32)

    shared = text(sizes.num_shared)
    return [
        TraceRequest(
            arrival_s=0.0,
            prompt=np.concatenate((shared, text(sizes.num_own))),
            answer=text(sizes.num_generated),
            kind="system",
            session=number,
            tenant="",
            priority=1,
        )
        for number in range(sizes.num_requests)
    ]


def table(result: dict[str, Any]) -> str:
    """The Markdown table of a result."""
    runs, sizes = result["runs"], result["sizes"]
    head = ["", "mean TTFT, s", "99th percentile", "tokens/s", "TTFT to cache off"]
    head += ["tokens/s to cache off"]
    others = [name for name in runs if name not in (OFF, ON)]
    for name in others:
        head += [f"TTFT to {name}", f"tokens/s to {name}"]
    rows = []
    for name, own in runs.items():
        cells = [name, f"{_median(own, 'ttft_mean_s'):.2f}", f"{_median(own, 'ttft_p99_s'):.2f}"]
        cells.append(f"{_median(own, 'tokens_per_s'):.1f}")
        for other in (OFF, *others):
            cells += [_ratio(own, runs[other], key) for key in ("ttft_mean_s", "tokens_per_s")]
        rows.append(cells)
    versions = ", ".join(f"{name} {own[0]['version']}" for name, own in runs.items() if name != OFF)
    below = (
        f"{sizes['num_requests']} requests at once, {sizes['num_shared']} shared tokens and"
        f" {sizes['num_own']} of their own, {sizes['num_generated']} generated; {result['model']},"
        f" float32, {result['cpu']}; {versions}. Medians of {sizes['rounds']} rounds, ratios with the"
        f" smallest and the largest; load of the machine before it: {result['load_before']}. Data:"
        " `results/prefix_shared.json`."
    )
    return f"{markdown(head, rows)}\n\n{below}"


def panels(result: dict[str, Any]) -> list[Panel]:
    """Bars, an engine each."""
    runs = result["runs"]
    labels = {"ttft_mean_s": "seconds", "tokens_per_s": "tokens/s"}
    titles = {"ttft_mean_s": "mean time to the first token", "tokens_per_s": "throughput"}
    return [
        bar_panel(titles[key], label, {name: _median(own, key) for name, own in runs.items()})
        for key, label in labels.items()
    ]


def _median(runs: Sequence[dict[str, Any]], key: str) -> float:
    return float(statistics.median(run[key] for run in runs))


def _ratio(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], key: str) -> str:
    ratios = [our[key] / their[key] for our, their in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
