"""Linear layers alone: the CPU plugin's kernel and torch's, beside what the machine allows.

One pass multiplies so many rows with every weight of SmolLM2-135M once (30 layers and the head), so
that weights come from memory as they do in a step. In each round all run a pass, in an order that
turns: float weights, torch's product with them, and weights in codes of each format. Writes a JSON file
and the table of this folder's README.

    python examples/bench/bench_kernels.py
    PEGBOARD_CPU_ISA=avx2 python examples/bench/bench_kernels.py --threads 1 --rows 1 --rows 32
    python examples/bench/bench_kernels.py --threads 1 --cpu-time      # on a busy machine
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from report import circumstances, markdown, write_result, write_table
from rounds import machine_limits
from torch.nn import functional as F

from pegboard.interfaces.kernel import KernelContext, LinearKernel
from pegboard.interfaces.quantizer import LinearWeight
from pegboard_cpu.kernels import cpu_kernel
from pegboard_cpu.library import instruction_set
from pegboard_cpu.weight import NativeWeight

HERE = Path(__file__).parent
NUM_LAYERS = 30
SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
"""[out_features, in_features] of SmolLM2-135M's fused layers."""

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
GROUP_SIZE = 32
FORMATS = {
    "float": None,
    "uint4": GROUP_SIZE,
    "uint4:grouped": GROUP_SIZE,
    "int8": GROUP_SIZE,
    "int8:grouped": GROUP_SIZE,
    "int8:dynamic": None,
    "int8:static": None,
    "float8": None,
    "float8:dynamic": None,
    "float8:static": None,
}
"""Weight format to inputs a scale, as checkpoints have it; None: one scale an output, or none."""

FMA_LIMITS = {
    "avx512_vnni": "fma512_fp32_gflop_s",
    "avx512": "fma512_fp32_gflop_s",
    "avx2": "fma_fp32_gflop_s",
}
"""Instruction set to the measurement of `peers/machine.py` that bounds it."""

Weights = list[tuple[str, torch.Tensor]]
Linear = Callable[[torch.Tensor, int], torch.Tensor]
"""Inputs and the number of a weight -> outputs."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one pass, by layer kind."""

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def main() -> None:
    options = _options()
    result: dict[str, Any] = {
        **circumstances(),
        "clock": "processor time" if options.cpu_time else "wall time",
        "instruction_set": instruction_set(),
        "torch": torch.__version__,
        "rounds": options.rounds,
        "machine": machine_limits(),
    }
    weights = _weights()
    result["cases"] = [
        case for threads in options.threads for case in measure(weights, threads, options)
    ]
    write_result(options.out, result)
    write_table(options.page, "bench_kernels", table(result))


def measure(
    weights: Weights, num_threads: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A case for each number of rows: medians of milliseconds by kernel and layer kind, and the bytes
    of each format's weights."""
    torch.set_num_threads(num_threads)
    linears: dict[str, Linear] = {"torch": lambda x, number: F.linear(x, weights[number][1])}
    num_bytes: dict[str, int] = {}
    for format in options.formats:
        linears[format], num_bytes[format] = _native(weights, format, num_threads)
    kinds = [kind for kind, _ in weights]
    clock = time.process_time if options.cpu_time else time.perf_counter
    cases = []
    for num_rows in options.rows:
        passes: dict[str, list[Pass]] = {name: [] for name in linears}
        for number in range(options.rounds + 1):
            for name in list(linears)[:: 1 if number % 2 else -1]:
                passes[name].append(_pass(linears[name], kinds, num_rows, clock))
        # the first round pays for memory that later ones find
        cases.append(
            {"threads": num_threads, "rows": num_rows, "bytes": num_bytes}
            | {name: _medians(done[1:]) for name, done in passes.items()}
        )
        print(num_threads, num_rows, cases[-1], file=sys.stderr)
    return cases


def table(result: dict[str, Any]) -> str:
    """The Markdown table of a result."""
    head = ["threads", "rows", "weights", "ms", "GB/s", "GFLOP/s", "of the limit", "float's ms"]
    head += ["ratio", "torch's ms", "ratio"]
    rows = [
        _row(result, case, format, num_bytes)
        for case in result["cases"]
        for format, num_bytes in case["bytes"].items()
    ]
    return "\n".join((markdown(head, rows), "", _caption(result)))


def _row(result: dict[str, Any], case: dict[str, Any], format: str, num_bytes: int) -> list[str]:
    machine, fma = result["machine"], FMA_LIMITS.get(result["instruction_set"])
    threads, num_rows = case["threads"], case["rows"]
    seconds, num_flops = case[format]["total"] / 1e3, 2 * num_rows * _num_weights()
    limit = num_bytes / machine[f"read_gb_s_{threads}t"] / 1e9
    # whole numbers are multiplied faster than floats: there the reading alone is a limit
    whole = ":" in format and not format.startswith("float8")
    if fma is not None and not whole:
        limit = max(limit, num_flops / machine[f"{fma}_{threads}t"] / 1e9)
    row = [str(threads), str(num_rows), format, f"{seconds * 1e3:.1f}"]
    row += [f"{num_bytes / seconds / 1e9:.1f}", f"{num_flops / seconds / 1e9:.0f}"]
    row.append(f"{limit / seconds:.0%}")
    for other in ("float", "torch"):
        theirs = case[other]["total"] if other in case else None
        row += ["", ""] if theirs is None else [f"{theirs:.1f}", f"{theirs / seconds / 1e3:.2f}"]
    return row


def _caption(result: dict[str, Any]) -> str:
    machine, fma = result["machine"], FMA_LIMITS.get(result["instruction_set"])
    limits = []
    for threads in sorted({case["threads"] for case in result["cases"]}):
        text = f"{machine[f'read_gb_s_{threads}t']:.1f} GB/s"
        if fma is not None:
            text += f" and {machine[f'{fma}_{threads}t']:.0f} GFLOP/s"
        limits.append(f"{text} with {threads} thread{'s' if threads > 1 else ''}")
    return (
        f"float32 activations, 4-bit weights and those of `int8` and `int8:grouped` in groups of "
        f"{GROUP_SIZE}, {result['instruction_set']}, {result['cpu']}, torch {result['torch']}; "
        f"medians of {result['rounds']} rounds, {result['clock']}. The limit is the slower of reading "
        "the weights and, for float inputs, multiplying, measured in the same run: "
        f"{'; '.join(limits)}. Load of the machine before it: {result['load_before']:.1f}. By layer "
        "kind: `results/kernels.json`."
    )


def _pass(linear: Linear, kinds: list[str], num_rows: int, clock: Callable[[], float]) -> Pass:
    inputs = {kind: torch.randn(num_rows, in_features) for kind, (_, in_features) in SHAPES.items()}
    seconds = dict.fromkeys(SHAPES, 0.0)
    last = clock()
    for number, kind in enumerate(kinds):
        linear(inputs[kind], number)
        now = clock()
        seconds[kind] += now - last
        last = now
    return Pass(seconds)


def _medians(passes: list[Pass]) -> dict[str, float]:
    """Milliseconds, by layer kind and of the whole pass."""
    medians = {"total": statistics.median(one.total for one in passes)}
    for kind in SHAPES:
        medians[kind] = statistics.median(one.seconds[kind] for one in passes)
    return {kind: round(1e3 * seconds, 3) for kind, seconds in medians.items()}


def _native(weights: Weights, format: str, num_threads: int) -> tuple[Linear, int]:
    """A product by number of the weight, and the bytes of all weights."""
    kernel = cast(
        LinearKernel, cpu_kernel(KernelContext("linear", format, "float32", "cpu", num_threads))
    )
    packed = [kernel.prepare(_weight(values, format)) for _, values in weights]
    num_bytes = sum(cast(NativeWeight, weight).num_bytes for weight in packed)
    return lambda x, number: kernel.linear(x, packed[number]), num_bytes


def _weight(values: torch.Tensor, format: str) -> LinearWeight:
    """The weight in a format; codes are random, with scales that float16 holds and one zero."""
    out_features, in_features = values.shape
    shape = (out_features, in_features)
    kind, _, activations = format.partition(":")
    if kind == "float":
        return LinearWeight(format, shape, values=values)
    scales = torch.rand(out_features, in_features // (FORMATS[format] or in_features))
    scales = scales.half().float()
    return LinearWeight(
        format,
        shape,
        codes=_codes(values, kind),
        scales=scales,
        zeros=torch.full_like(scales, 8.0) if kind == "uint4" else None,
        activations=cast(Any, activations or "float"),
        input_scale=torch.ones(1) if activations == "static" else None,
    )


def _codes(values: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "float8":
        return values.to(torch.float8_e4m3fn)
    codes = torch.randint(0, 16 if kind == "uint4" else 256, values.shape, dtype=torch.uint8)
    return codes if kind == "uint4" else codes.view(torch.int8)


def _weights() -> Weights:
    """Random weights in the order in which a step reads them."""
    layer = [kind for kind in SHAPES if kind != "head"]
    return [(kind, torch.randn(SHAPES[kind])) for kind in [*layer * NUM_LAYERS, "head"]]


def _num_weights() -> int:
    sizes = {kind: rows * columns for kind, (rows, columns) in SHAPES.items()}
    return NUM_LAYERS * (sum(sizes.values()) - sizes["head"]) + sizes["head"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", action="append", type=int, help="may be repeated")
    parser.add_argument("--threads", action="append", type=int, help="may be repeated")
    parser.add_argument(
        "--formats",
        action="append",
        choices=FORMATS,
        help="may be repeated; all but static ones, which multiply as the dynamic ones do",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="processor time: on a busy machine, with --threads 1",
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernels.json")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="gets the table")
    options = parser.parse_args()
    options.rows = options.rows or list(ROWS)
    options.formats = options.formats or [
        format for format in FORMATS if not format.endswith(":static")
    ]
    options.threads = options.threads or sorted({1, 2 ** ((os.cpu_count() or 1).bit_length() - 1)})
    return options


if __name__ == "__main__":
    main()
