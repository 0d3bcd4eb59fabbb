"""Quantized weights beside peers: speed, memory and start, in one run.

Pegboard on a file of 4-bit and on one of 8-bit weights, and on the same model in float32; llama.cpp and
OpenVINO on the same files. Each loads once, in a process of its own; in each round all take turns (see
`rounds.py`). Writes a JSON file, the tables of this folder's README and short ones in
`docs/performance.md`; `speed_summary.py` then makes the README's.

    python examples/bench/bench_quant.py
    python examples/bench/bench_quant.py --peer xllamacpp=/path/to/python --peer openvino=/another
    python examples/bench/bench_quant.py --threads 1 --cpu-time --starts 0     # on a busy machine
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bench_start import QUICKSTART
from bench_start import measure as measure_starts
from peer_process import prepare_models
from quant_memory import memory_of
from quant_tables import FLOAT, WEIGHTS, full, short
from report import circumstances, write_result, write_table
from rounds import CASES, machine_limits, round_options, started, take_turns

from pegboard_cpu.library import instruction_set

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "performance.md"
ENGINES = {
    "pegboard": ("pegboard", "float32"),
    "xllamacpp": ("xllamacpp", ""),
    "openvino": ("openvino", ""),
}
"""Engine to its script (`peers/peer_SCRIPT.py`) and dtype: ours packs the file's weights and computes
in float32 beside them; the others take their defaults."""


def main() -> None:
    options = _options()
    prepare_models(options.models)
    files = {bits: options.models / file for bits, file in WEIGHTS.items()}
    result: dict[str, Any] = {
        **circumstances(),
        "threads": options.threads,
        "clock": "processor time" if options.cpu_time else "wall time",
        "rounds": options.rounds,
        "instruction_set": instruction_set(),
        "machine": machine_limits(),
        "memory": {bits: memory_of(file, options.threads) for bits, file in files.items()},
        "starts": measure_starts(QUICKSTART, options.starts) if options.starts else None,
        **_measure(options),
    }
    write_result(options.out, result)
    if options.page is not None:
        write_table(options.page, "bench_quant", full(result))
    else:
        write_table(PAGE, "bench_quant", short(result))
        write_table(HERE / "README.md", "bench_quant", full(result))


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    pythons = {"pegboard": sys.executable, **dict(options.peer)}
    peers = []
    for engine, python in pythons.items():
        script, dtype = ENGINES[engine]
        for bits, file in WEIGHTS.items():
            peers.append(started(f"{engine} {bits}", python, (script, file, dtype), options))
    own = ("pegboard", "hf-f32", "float32")
    peers.append(started(FLOAT, sys.executable, own, options))
    cases = take_turns(peers, options)
    for peer in peers:
        peer.close()
    return {"peers": {peer.name: peer.about for peer in peers}, "cases": cases}


def _options() -> argparse.Namespace:
    parser = round_options(__doc__, [name for name in ENGINES if name != "pegboard"])
    parser.add_argument("--starts", type=int, default=5, help="of a server; 0: not measured")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "quant.json")
    parser.add_argument(
        "--page", type=Path, help="gets the full tables, and the committed pages nothing"
    )
    options = parser.parse_args()
    options.case = options.case or list(CASES)
    return options


if __name__ == "__main__":
    main()
