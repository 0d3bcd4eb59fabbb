"""The second turn of a chat: time to its first token against the tokens that are new in it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from plots import Panel, line_panel
from report import markdown
from traces import FIRST_ID

from pegboard import Engine, SamplingParams


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of the first turn, new ones of the second, answers'; and rounds."""

    histories: tuple[int, ...] = (128, 512, 1024, 2048, 4096)
    new: tuple[int, ...] = (16, 64, 128, 256, 512)
    num_answer: int = 16
    rounds: int = 3


FULL = Sizes()
TINY = Sizes(histories=(32, 64), new=(4, 16, 40), num_answer=2, rounds=1)


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's seconds to its first token, its cached tokens, and its answer."""

    ttft_s: float
    num_cached: int
    answer: tuple[int, ...]


def measure(model: Path, sizes: Sizes) -> dict[str, Any]:
    """Each history's first turn, and its second turns with other numbers of new tokens."""
    longest = max(sizes.histories) + max(sizes.new) + 2 * sizes.num_answer + 1
    config = {
        "model": str(model),
        "prefix_cache": "on",
        "max_model_len": longest,
        "scheduler": {"max_num_seqs": 4},
    }
    cases: dict[str, dict[str, Any]] = {
        str(history): {"first": [], "second": {str(new): [] for new in sizes.new}}
        for history in sizes.histories
    }
    random = np.random.default_rng(0)
    with Engine(config) as engine:
        vocab_size = engine.prepared.composition.target.shape.vocab_size

        def text(num_tokens: int) -> list[int]:
            ids: list[int] = random.integers(FIRST_ID, vocab_size, num_tokens).tolist()
            return ids

        _turn(engine, text(min(sizes.histories)), sizes.num_answer)  # what is set up at first use
        for number in range(sizes.rounds):
            for history in sizes.histories:
                first = text(history)
                turn = _turn(engine, first, sizes.num_answer)
                case = cases[str(history)]
                case["first"].append(turn.ttft_s)
                for new in sizes.new[:: 1 if number % 2 else -1]:
                    prompt = [*first, *turn.answer, *text(new)]
                    second = _turn(engine, prompt, 1)
                    computed = len(prompt) - second.num_cached
                    case["second"][str(new)].append({"ttft_s": second.ttft_s, "computed": computed})
            print(f"round {number + 1} of {sizes.rounds}", file=sys.stderr)
    for case in cases.values():
        case["fit"] = _fit([run for runs in case["second"].values() for run in runs])
    return {"sizes": asdict(sizes), "model": model.name, "cases": cases}


def table(result: dict[str, Any]) -> str:
    """The Markdown table of a result."""
    news = result["sizes"]["new"]
    head = ["first turn", "its TTFT, ms", *(f"{new} new tokens" for new in news)]
    head += ["ms a computed token", "and once", "R²"]
    rows = []
    for history, case in result["cases"].items():
        cells = [history, f"{1e3 * statistics.median(case['first']):.0f}"]
        cells += [f"{1e3 * _median(case['second'][str(new)]):.0f}" for new in news]
        fit = case["fit"]
        cells += [f"{1e3 * fit['token_s']:.2f}", f"{1e3 * fit['once_s']:.0f}", f"{fit['r2']:.3f}"]
        rows.append(cells)
    below = (
        f"Milliseconds to the first token of a second turn, medians of {result['sizes']['rounds']}"
        " rounds. It computes its new tokens and what the last full block of history and answer left"
        f" over. {result['model']}, {result['cpu']}, pegboard {result['pegboard']}; load of the"
        f" machine before it: {result['load_before']}. Data: `results/prefix_turns.json`."
    )
    return f"{markdown(head, rows)}\n\n{below}"


def panels(result: dict[str, Any]) -> list[Panel]:
    """A line a history."""
    lines = {
        f"history of {history}": sorted(
            (statistics.median(run["computed"] for run in runs), 1e3 * _median(runs))
            for runs in case["second"].values()
        )
        for history, case in result["cases"].items()
    }
    labels = "computed tokens of the second turn", "ms to the first token"
    return [line_panel("second turn of a chat", labels, lines)]


def _turn(engine: Engine, prompt: Sequence[int], max_tokens: int) -> Turn:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    begin = time.perf_counter()
    engine.submit(prompt, params)
    ttft_s, num_cached = 0.0, 0
    answer: list[int] = []
    while engine.has_work():
        for delta in engine.step():
            ttft_s = ttft_s or time.perf_counter() - begin
            num_cached = delta.num_cached_tokens
            answer += delta.token_ids
    return Turn(ttft_s, num_cached, tuple(answer))


def _fit(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The line through seconds by computed tokens, and how much of their variance it explains."""
    computed, seconds = (np.array([run[key] for run in runs]) for key in ("computed", "ttft_s"))
    token_s, once_s = np.polyfit(computed, seconds, 1)
    rest = seconds - (once_s + token_s * computed)
    return {
        "token_s": float(token_s),
        "once_s": float(once_s),
        "r2": float(1 - rest.var() / seconds.var()),
    }


def _median(runs: Sequence[dict[str, Any]]) -> float:
    return float(statistics.median(run["ttft_s"] for run in runs))
