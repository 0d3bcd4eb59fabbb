"""Tokens a second at every batch size from 1 on: where a kernel's tiles end, speed must not fall.

Each round generates from every batch size once, upwards and downwards in turn, so that what the
machine does meanwhile meets all sizes. Writes a JSON file, a chart, and the summary in this folder's
README.

    python examples/bench/bench_batch.py
    python examples/bench/bench_batch.py --config my.yaml --set kernels=cpu --most 64 --rounds 7
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from report import circumstances, markdown, write_table

from pegboard import Engine, SamplingParams, __version__
from pegboard.config import load_config

HERE = Path(__file__).parent
CONFIG = HERE / "dequantized.yaml"
NUM_SHOWN = 5
"""Batch sizes in the table: those furthest below their neighbours."""


def main() -> None:
    options = _options()
    sets = [
        "prefix_cache=none",
        f"scheduler.max_num_seqs={options.most}",
        # All prompts in one step, so that all sequences decode in the same steps.
        f"scheduler.max_num_batched_tokens={options.most * options.prompt}",
    ]
    config = load_config(options.config, sets=[*sets, *options.set])
    result: dict[str, Any] = {
        **circumstances(),
        "pegboard": __version__,
        "config": options.config.name,
        "set": options.set,
        "clock": "processor time" if options.cpu_time else "wall time",
        "prompt_tokens": options.prompt,
        "generated_tokens": options.generated,
        "rounds": options.rounds,
    }
    clock = time.process_time if options.cpu_time else time.perf_counter
    with Engine(config) as engine:
        _decode_s(
            engine, options.most, options, clock
        )  # what is set up at first use is not counted
        runs: dict[int, list[float]] = {size: [] for size in range(1, options.most + 1)}
        for number in range(options.rounds):
            for size in sorted(runs, reverse=number % 2 == 1):
                runs[size].append(_decode_s(engine, size, options, clock))
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    counts = {size: size * (options.generated - 1) for size in runs}
    result["tokens_per_s"] = {
        size: [round(counts[size] / seconds, 2) for seconds in times]
        for size, times in runs.items()
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    medians = {size: statistics.median(rates) for size, rates in result["tokens_per_s"].items()}
    options.out.with_suffix(".svg").write_text(chart(medians))
    write_table(HERE / "README.md", "bench_batch", summary(result, medians, options.out))


def to_neighbours(medians: dict[int, float]) -> dict[int, float]:
    """Speed of each batch size by the mean of the sizes beside it; 1: no cliff."""
    return {
        size: 2 * medians[size] / (medians[size - 1] + medians[size + 1])
        for size in medians
        if size - 1 in medians and size + 1 in medians
    }


def summary(result: dict[str, Any], medians: dict[int, float], data: Path) -> str:
    """The README's table of a result."""
    ratios = to_neighbours(medians)
    lowest = sorted(ratios, key=ratios.__getitem__)[:NUM_SHOWN]
    rows = []
    for size in lowest:
        rates = [f"{medians[near]:.1f}" for near in (size, size - 1, size + 1)]
        rows.append([f"{size}", rates[0], ", ".join(rates[1:]), f"{ratios[size]:.2f}"])
    settings = "".join(f", `--set {value}`" for value in result["set"])
    return "\n".join(
        (
            f"![Tokens a second by batch size](results/{data.with_suffix('.svg').name})",
            "",
            markdown(["batch size", "tokens/s", "one less, one more", "to their mean"], rows),
            "",
            f"The {len(rows)} sizes furthest below their neighbours, of 1 to {max(medians)}. Decoding "
            f"after prompts of {result['prompt_tokens']} tokens, {result['generated_tokens']} "
            f"generated, medians of {result['rounds']} rounds, {result['clock']}; "
            f"`{result['config']}`{settings}; {result['cpu']}; pegboard {result['pegboard']}; load of "
            f"the machine before it: {result['load_before']:.1f}. Data: `results/{data.name}`.",
        )
    )


def chart(medians: dict[int, float]) -> str:
    """Tokens a second by batch size, as SVG."""
    width, height, margin = 640, 240, 40
    most_size, most_rate = max(medians), max(medians.values())

    def place(size: int, rate: float) -> tuple[float, float]:
        x = margin + (width - 2 * margin) * size / most_size
        return x, height - margin - (height - 2 * margin) * rate / most_rate

    def text(x: float, y: float, content: str, anchor: str) -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(content)}</text>'

    points = [place(size, rate) for size, rate in medians.items()]
    (left, bottom), (right, top) = place(0, 0), place(most_size, most_rate)
    sizes = [size for size in medians if size % 8 == 0 or size == 1]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<path d="M{left:.0f} {top:.0f}V{bottom:.0f}H{right:.0f}" fill="none" stroke="gray"/>',
            f'<polyline points="{_pairs(points)}" fill="none" stroke="steelblue"/>',
            *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="steelblue"/>' for x, y in points),
            *(text(place(size, 0)[0], bottom + 16, str(size), "middle") for size in sizes),
            text((left + right) / 2, height - 6, "batch size", "middle"),
            text(left - 4, top + 4, f"{most_rate:.0f}", "end"),
            text(left - 4, bottom + 4, "0", "end"),
            text(left, top - 12, "tokens/s", "middle"),
            "</svg>\n",
        )
    )


def _pairs(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _decode_s(
    engine: Engine, size: int, options: argparse.Namespace, clock: Callable[[], float]
) -> float:
    """Seconds from the step in which the last sequence gets its first token to the end."""
    vocabulary = engine.prepared.composition.target.shape.vocab_size
    draw = random.Random(size)
    params = SamplingParams(temperature=0.0, max_tokens=options.generated, ignore_eos=True)
    for _ in range(size):
        engine.submit([draw.randrange(vocabulary) for _ in range(options.prompt)], params)
    prefilled: set[str] = set()
    began = 0.0
    while engine.has_work():
        prefilled |= {delta.request_id for delta in engine.step()}
        if not began and len(prefilled) == size:
            began = clock()
    return clock() - began


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the config")
    parser.add_argument("--most", type=int, default=40, help="largest batch size")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--generated", type=int, default=16, help="tokens generated, 2 or more")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="processor time: on a busy machine")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "batch.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
