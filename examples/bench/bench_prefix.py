"""The prefix cache: what it saves, what it costs, and how near it comes to what could be saved.

Parts:
    shared  requests that share a system prompt, cache on and off, and vLLM's if it is there
    turns   a chat's second turn: time to the first token against its new tokens
    cost    time of the cache's calls beside a long prompt's steps, and by its size; memory
    hits    hit rates on traces, beside the optimum's and Belady's

Each writes a JSON file, a plot, and its table in this folder's README.

    python examples/bench/bench_prefix.py
    python examples/bench/bench_prefix.py --part shared --peer vllm=/path/to/its/python
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import prefix_cost
import prefix_hits
import prefix_shared
import prefix_turns
from peer_process import MODELS, prepare_models
from plots import write_plot
from report import circumstances, write_result, write_table

from pegboard import __version__

HERE = Path(__file__).parent
PARTS = {
    "shared": prefix_shared,
    "turns": prefix_turns,
    "cost": prefix_cost,
    "hits": prefix_hits,
}


def main() -> None:
    options = _options()
    for name in options.part:
        part = PARTS[name]
        result = {**circumstances(), "pegboard": __version__, **_measure(name, options)}
        write_result(options.out / f"prefix_{name}.json", result)
        write_plot(options.out / f"prefix_{name}.svg", part.panels(result))
        plot = f"![{name}](results/prefix_{name}.svg)"
        write_table(options.page, f"bench_prefix_{name}", f"{plot}\n\n{part.table(result)}")


def _measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    part = PARTS[name]
    sizes: Any = part.TINY if options.tiny else part.FULL
    if name == "hits":
        return prefix_hits.measure(sizes)
    if name == "shared":
        return prefix_shared.measure(_model(options), sizes, options.peer)
    measured: dict[str, Any] = part.measure(_model(options), sizes)
    return measured


def _model(options: argparse.Namespace) -> Path:
    if options.model is None:
        prepare_models(MODELS)
    model: Path = options.model or MODELS / "hf-f32"
    return model


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated")
    parser.add_argument("--model", type=Path, help="a folder; else SmolLM2 as float32, prepared")
    parser.add_argument("--peer", action="append", default=[], type=_peer, help="vllm=PYTHON")
    parser.add_argument("--tiny", action="store_true", help="seconds: to see that all of it runs")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the data")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="gets the tables")
    options = parser.parse_args()
    options.part = options.part or list(PARTS)
    return options


def _peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name != "vllm" or not python:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: vllm=PYTHON")
    return name, python


if __name__ == "__main__":
    main()
