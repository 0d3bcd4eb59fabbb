"""Pegboard and its peers on this machine, in one run.

Each engine loads once, in a process of its own. In each round every engine runs every case, in an
order that turns; a ratio compares two runs of one round, so that what the machine does meanwhile
meets both. Writes a JSON file and the table of the README.

    python examples/bench/bench_engine.py
    python examples/bench/bench_engine.py --peer vllm=/path/to/its/python --case 8x128x64 --rounds 7
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_process import MODELS, PeerProcess, prepare_models
from report import markdown, write_table

HERE = Path(__file__).parent
README = HERE.parent.parent / "README.md"
CASES = ("1x128x64", "8x128x64", "32x128x64")
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
"""Marks of a table in the README to whose speed it shows."""


def main() -> None:
    options = _options()
    prepare_models(options.models)
    pythons = dict.fromkeys(("pegboard", "pegboard-torch", "transformers"), sys.executable)
    pythons |= dict(options.peer)
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "threads": options.threads,
        "clock": "processor time" if options.cpu_time else "wall time",
        "load_before": os.getloadavg()[0],
        "machine": _machine(),
        **_measure(pythons, options),
    }
    result["limits"] = {
        case: _limits(case, options.models, result["machine"], options.threads)
        for case in options.case
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for mark, ours in OURS.items():
        write_table(README, mark, table(result, ours))


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
        batch, prompt_len, gen_len = _sizes(case)
        counts = {"total": batch * gen_len, "decode": batch * (gen_len - 1)}
        counts["prefill"] = batch * prompt_len
        rates = {
            (name, part): count / statistics.median(run[part] for run in runs[name])
            for name in runs
            for part, count in counts.items()
        }
        limit = counts["decode"] / result["limits"][case]["decode_s"]
        cells = [case, *(f"{rates[ours, part]:.0f}" for part in counts), f"{limit:.0f}"]
        for name in peers:
            cells.append(f"{rates[name, 'total']:.0f}")
            cells += [_ratio(runs[ours], runs[name], part) for part in counts]
        rows.append(cells)
    machine, about = result["machine"], result["peers"]
    versions = ", ".join(f"{name} {about[name]['version']}" for name in (ours, *peers))
    threads = result["threads"]
    below = (
        f"SmolLM2-135M, float32, greedy, threads: {threads}, {machine['cpu']}, {result['clock']}; "
        f"{versions}. Ratios are medians of {result['rounds']} rounds, with the smallest and the "
        f"largest round; above 1, {ours} is faster. Measured in the same run: "
        f"{machine[f'read_gb_s_{threads}t']:.1f} GB/s read, "
        f"{_gflop_s(machine, threads):.0f} GFLOP/s; load of the machine before it: "
        f"{result['load_before']:.1f}. Peak memory, MB: {_peaks(result, (ours, *peers))}."
        " Data: `examples/bench/results/`."
    )
    return f"{markdown(head, rows)}\n\n{below}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", help="BATCHxPROMPTxGENERATED; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peer", action="append", default=[], type=_peer, help="NAME=PYTHON")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="processor time: on a busy machine, with --threads 1",
    )
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "engine.json")
    options = parser.parse_args()
    options.case = options.case or list(CASES)
    return options


def _peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in PEERS or not python:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: NAME=PYTHON of {', '.join(PEERS)}")
    return name, python


def _machine() -> dict[str, Any]:
    output = subprocess.run(
        [sys.executable, str(HERE / "peers" / "machine.py")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    limits: dict[str, Any] = json.loads(output)
    return limits


def _measure(pythons: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    peers = [_started(name, python, options) for name, python in pythons.items()]
    prefix = "cpu_" if options.cpu_time else ""
    cases: dict[str, dict[str, list[dict[str, Any]]]] = {
        case: {peer.name: [] for peer in peers} for case in options.case
    }
    for number in range(options.rounds):
        for case in options.case:
            turn = number % len(peers)
            for peer in peers[turn:] + peers[:turn]:
                run = peer.ask({"case": case, "run": number})
                parts = {part: run[f"{prefix}{part}_s"] for part in ("total", "decode", "prefill")}
                kept = {"tokens": run["tokens"][:8], "peak_rss_mb": run["peak_rss_mb"]}
                cases[case][peer.name].append(parts | kept)
                print(number, case, peer.name, f"{parts['total']:.2f} s", file=sys.stderr)
    for peer in peers:
        peer.close()
    about = {peer.name: peer.about for peer in peers}
    return {"rounds": options.rounds, "peers": about, "cases": cases}


def _started(name: str, python: str, options: argparse.Namespace) -> PeerProcess:
    script, model, dtype = PEERS[name]
    arguments = ["--model", str(options.models / model), "--dtype", dtype]
    arguments += ["--threads", str(options.threads)]
    for case in options.case:
        arguments += ["--case", case]
    return PeerProcess(name, python, script, arguments)


def _limits(case: str, models: Path, machine: dict[str, Any], threads: int) -> dict[str, float]:
    """The least seconds that reading the weights once a step, or their products, would take."""
    batch, prompt_len, gen_len = _sizes(case)
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


def _peaks(result: dict[str, Any], names: Sequence[str]) -> str:
    """Each engine's most resident memory over all cases."""
    peaks = {
        name: max(run["peak_rss_mb"] for case in result["cases"].values() for run in case[name])
        for name in names
    }
    return ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items())


def _gflop_s(machine: dict[str, Any], threads: int) -> float:
    """Of the widest float32 FMA loop that the machine runs."""
    loops = ("fma_fp32_gflop_s", "fma512_fp32_gflop_s")
    return float(max(machine.get(f"{loop}_{threads}t", 0.0) for loop in loops))


def _ratio(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], part: str) -> str:
    ratios = [their[part] / our[part] for our, their in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _sizes(case: str) -> tuple[int, int, int]:
    batch, prompt_len, gen_len = (int(size) for size in case.split("x"))
    return batch, prompt_len, gen_len


if __name__ == "__main__":
    main()
