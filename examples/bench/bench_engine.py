"""Pegboard and its peers on this machine, in one run.

Each engine loads once, in a process of its own; in each round all take turns (see `rounds.py`). Writes a
JSON file and the tables of `docs/performance.md`; `speed_summary.py` then makes the README's.

    python examples/bench/bench_engine.py
    python examples/bench/bench_engine.py --peer vllm=/path/to/its/python --case 8x128x64 --rounds 7
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from peer_process import prepare_models
from report import circumstances, markdown, write_result, write_table
from rounds import (
    CASES,
    PARTS,
    machine_limits,
    num_tokens,
    peaks,
    rates,
    ratio,
    round_options,
    sizes,
    started,
    take_turns,
)

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "performance.md"
PEERS = {
    "pegboard": ("pegboard", "hf-f32", "float32"),
    "pegboard-torch": ("pegboard", "hf-f32", "float32,torch"),
    "transformers": ("transformers", "hf-f32", "float32"),
    "vllm": ("vllm", "hf-f32", "float32"),
    "xllamacpp": ("xllamacpp", "model-f32.gguf", ""),
    "llama_cpp": ("llama_cpp", "model-f32.gguf", ""),
    "openvino": ("openvino", "model-q8_0.gguf", ""),
}
"""Peer to its script (`peers/peer_SCRIPT.py`), its model, as `prepare_model.py` writes it, and dtype."""
OURS = {"bench_engine": "pegboard", "bench_engine_torch": "pegboard-torch"}
"""Marks of a table in the page to whose speed it shows."""


def main() -> None:
    options = _options()
    prepare_models(options.models)
    pythons = dict.fromkeys(("pegboard", "pegboard-torch", "transformers"), sys.executable)
    pythons |= dict(options.peer)
    about = circumstances()
    result = {
        "date": about["date"],
        "threads": options.threads,
        "clock": "processor time" if options.cpu_time else "wall time",
        "load_before": about["load_before"],
        "machine": machine_limits(),
        **_measure(pythons, options),
    }
    result["limits"] = {
        case: _limits(case, options.models, result["machine"], options.threads)
        for case in options.case
    }
    write_result(options.out, result)
    for mark, ours in OURS.items():
        write_table(options.page, mark, table(result, ours))


def table(result: dict[str, Any], ours: str) -> str:
    """The Markdown table of a result: one of ours, beside all that are not."""
    peers = [name for name in result["peers"] if name not in OURS.values()]
    head = [
        "batch x prompt x generated",
        f"{ours}, tokens/s",
        "decode",
        "prefill",
        "decode's limit",
    ]
    for name in peers:
        head += [f"{name}, tokens/s", f"ratio to {name}", "decode", "prefill"]
    rows = []
    for case, runs in result["cases"].items():
        speeds = {name: rates(case, runs[name]) for name in runs}
        limit = num_tokens(case)["decode"] / result["limits"][case]["decode_s"]
        cells = [case, *(f"{speeds[ours][part]:.0f}" for part in PARTS), f"{limit:.0f}"]
        for name in peers:
            cells.append(f"{speeds[name]['total']:.0f}")
            cells += [ratio(runs[ours], runs[name], part) for part in PARTS]
        rows.append(cells)
    return f"{markdown(head, rows)}\n\n{_caption(result, ours, peers)}"


def _caption(result: dict[str, Any], ours: str, peers: list[str]) -> str:
    machine, about = result["machine"], result["peers"]
    versions = ", ".join(f"{name} {about[name]['version']}" for name in (ours, *peers))
    threads = result["threads"]
    return (
        f"SmolLM2-135M, float32, greedy, threads: {threads}, {machine['cpu']}, {result['clock']}; "
        f"{versions}. Ratios are medians of {result['rounds']} rounds, with the smallest and the "
        f"largest round; above 1, {ours} is faster. Measured in the same run: "
        f"{machine[f'read_gb_s_{threads}t']:.1f} GB/s read, "
        f"{_gflop_s(machine, threads):.0f} GFLOP/s; load of the machine before it: "
        f"{result['load_before']:.1f}. Peak memory, MB: {peaks(result['cases'], (ours, *peers))}."
        " Data: `examples/bench/results/`."
    )


def _options() -> argparse.Namespace:
    parser = round_options(__doc__, PEERS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "engine.json")
    parser.add_argument("--page", type=Path, default=PAGE, help="gets the tables")
    options = parser.parse_args()
    options.case = options.case or list(CASES)
    return options


def _measure(pythons: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    peers = [started(name, python, PEERS[name], options) for name, python in pythons.items()]
    cases = take_turns(peers, options)
    for peer in peers:
        peer.close()
    about = {peer.name: peer.about for peer in peers}
    return {"rounds": options.rounds, "peers": about, "cases": cases}


def _limits(case: str, models: Path, machine: dict[str, Any], threads: int) -> dict[str, float]:
    """The least seconds that reading the weights once a step, or their products, would take."""
    batch, prompt_len, gen_len = sizes(case)
    config = json.loads((models / "hf-f32" / "config.json").read_text())
    num_bytes = (models / "hf-f32" / "model.safetensors").stat().st_size
    head = config["vocab_size"] * config["hidden_size"]
    read = num_bytes / machine[f"read_gb_s_{threads}t"] / 1e9
    flops = _gflop_s(machine, threads) * 1e9
    weights = num_bytes / 4
    return {
        "decode_s": (gen_len - 1) * max(read, 2 * batch * weights / flops),
        "prefill_s": max(read, 2 * batch * prompt_len * (weights - head) / flops),
    }


def _gflop_s(machine: dict[str, Any], threads: int) -> float:
    """Of the widest float32 FMA loop that the machine runs."""
    loops = ("fma_fp32_gflop_s", "fma512_fp32_gflop_s")
    return float(max(machine.get(f"{loop}_{threads}t", 0.0) for loop in loops))


if __name__ == "__main__":
    main()
