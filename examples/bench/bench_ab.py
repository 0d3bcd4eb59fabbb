"""Two checkouts of Pegboard against each other: what a change costs, or gains, on this machine.

Both engines generate in turns (see `rounds.py`), with float32 weights and with packed ones of 4 and 8 bits;
then both measure the host's part of a step (see `bench_step.py`). Writes a JSON file and the table of this
folder's README.

    python examples/bench/bench_ab.py ../before            # a checkout with an environment in .venv
    python examples/bench/bench_ab.py ../before --case 1x128x64 --rounds 15 --running 64 256
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from peer_process import prepare_models
from quant_tables import WEIGHTS
from report import circumstances, markdown, write_result, write_table
from rounds import (
    CONFIDENCE,
    PARTS,
    interval,
    ratios,
    round_options,
    started,
    take_turns,
)

HERE = Path(__file__).parent
CASES = ("1x128x64", "8x128x64")
BEFORE, AFTER, UNLIMITED = "before", "after", "after, no limit of a step's time"
FLAGS = {BEFORE: "float32", AFTER: "float32", UNLIMITED: "float32,unlimited"}
"""An engine's name to the flags of `peer_pegboard.py`."""
MODELS = {"float32": ("hf-f32", (BEFORE, AFTER, UNLIMITED))} | {
    bits: (file, (BEFORE, AFTER)) for bits, file in WEIGHTS.items()
}
"""Weights to their file, and the engines that run it."""
HOST_STEP = """
import json, sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from bench_step import measure
from thin_model import write_thin_model
with tempfile.TemporaryDirectory() as name:
    write_thin_model(Path(name) / "thin")
    found = measure(Path(name) / "thin", int(sys.argv[2]), int(sys.argv[3]), text=True)
print(json.dumps(found["step"]["wall"]["median"]))
"""


def main() -> None:
    parser = round_options(__doc__, [])
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--running", type=int, nargs="*", default=[256], help="of host steps")
    parser.add_argument("--steps", type=int, default=300, help="of a round")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ab.json")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="gets the table")
    options = parser.parse_args()
    options.case = options.case or list(CASES)
    prepare_models(options.models)
    result = circumstances() | {"rounds": options.rounds, "threads": options.threads}
    python_before = str(options.before / ".venv" / "bin" / "python")
    result["cases"] = {}
    for weights, (file, names) in MODELS.items():
        pythons = {name: python_before if name == BEFORE else sys.executable for name in names}
        peers = [
            started(name, python, ("pegboard", file, FLAGS[name]), options)
            for name, python in pythons.items()
        ]
        result["cases"][weights] = take_turns(peers, options)
        for peer in peers:
            peer.close()
    result["host_steps"] = {
        str(running): _host_steps(options.before, running, options) for running in options.running
    }
    write_result(options.out, result)
    write_table(options.page, "bench_ab", table(result))


def table(result: dict[str, Any]) -> str:
    """Speed after to speed before: the median of the rounds, and the interval that holds it."""
    rows = []
    for weights, cases in result["cases"].items():
        for case, runs in cases.items():
            for name in (name for name in runs if name != BEFORE):
                shown = [interval(ratios(runs[name], runs[BEFORE], part)) for part in PARTS]
                rows.append([f"{case}, {weights}", name, *shown])
    for running, lasted in result["host_steps"].items():
        values = [b / a for b, a in zip(lasted["before"], lasted["after"], strict=True)]
        rows.append([f"host step, {running} sequences", AFTER, interval(values), "", ""])
    caption = (
        f"Medians of {result['rounds']} rounds, and the interval that holds the true one with"
        f" {CONFIDENCE:.0%}; SmolLM2-135M, threads: {result['threads']}, {result['cpu']}; load"
        f" of the machine before it: {result['load_before']}. Data: `results/ab.json`."
    )
    return f"{markdown(['speed to before', '', *PARTS], rows)}\n\n{caption}"


def _host_steps(before: Path, running: int, options: Any) -> dict[str, list[float]]:
    """Microseconds of the median host step of each round."""
    checkouts = {
        "before": (before / ".venv" / "bin" / "python", before / "examples" / "bench"),
        "after": (Path(sys.executable), HERE),
    }
    found: dict[str, list[float]] = {name: [] for name in checkouts}
    for number in range(options.rounds):
        for name in list(checkouts)[:: 1 if number % 2 else -1]:
            python, bench = checkouts[name]
            argv = [str(python), "-c", HOST_STEP, str(bench), str(running), str(options.steps)]
            output = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
            found[name].append(float(output))
    return found


if __name__ == "__main__":
    main()
