"""The table and the plot of `bench_spec.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plots import Panel, line_panel
from report import markdown
from rounds import CONFIDENCE, Run, bounds, interval

PLAIN = "none"
"""The engine without a drafter."""

AUTO = "auto"
LEAST = 0.97
"""Least ratio of the intervals' lower ends that is aimed at, where there is no other aim."""

AIMS = {("copy", "float32", 1): 2.0, ("copy", "4 bit", 1): 1.6}
"""Kind, weights and batch to the median that is aimed at."""

Case = Mapping[str, Any]


def table(result: Mapping[str, Any], data: str) -> str:
    """Speed to that without a drafter by number of tokens, beside the limit of reading the weights."""
    cases = sorted(result["cases"].values(), key=_order)
    numbers = _numbers(cases)
    head = ["task", "weights", "batch", "without, tokens/s", "limit", "drafter"]
    head += [f"{number}, ratio" for number in numbers]
    head += ["tokens/s", "limit", "tokens a step", "accepted at 1, 2, 3", "to the best fixed"]
    rows = []
    for case in cases:
        for drafter in _drafters(case):
            rows.append(_row(case, drafter, numbers))
    return f"{markdown(head, rows)}\n\n{_caption(cases, data)}"


def panels(result: Mapping[str, Any]) -> list[Panel]:
    """Ratio by batch size: a panel for each task and weights, a line for each drafter and number."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for case in sorted(result["cases"].values(), key=_order):
        lines = found.setdefault(f"{case['kind']}, {case['weights']}", {})
        for name in (name for name in case["runs"] if name != PLAIN):
            median = statistics.median(ratios(case, name))
            lines.setdefault(name, []).append((case["batch"], median))
    labels = ("sequences", "speed to that without a drafter")
    return [
        line_panel(title, labels, lines, logarithmic=(True, False))
        for title, lines in found.items()
    ]


def ratios(case: Case, name: str, to: str = PLAIN) -> list[float]:
    """Decoded tokens a second to another engine's, in each round."""
    runs = case["runs"]
    return [_rate(ours) / _rate(theirs) for ours, theirs in zip(runs[name], runs[to], strict=True)]


def _row(case: Case, drafter: str, numbers: Sequence[str]) -> list[str]:
    """The speed, tokens a step and acceptance are those of the last number that was measured."""
    names = {number: f"{drafter}, {number}" for number in numbers}
    names = {number: name for number, name in names.items() if name in case["runs"]}
    shown = list(names.values())[-1]
    runs, limit = case["runs"], _limit(case)
    tokens_a_step = _sum(runs[shown], "num_decoded") / _sum(runs[shown], "num_rows")
    cells = [case["kind"], case["weights"], str(case["batch"])]
    cells += [f"{_speed(runs[PLAIN]):.0f}", f"{limit:.0f}", drafter]
    for number in numbers:
        cells.append(_beside_aim(case, names[number]) if number in names else "")
    cells += [f"{_speed(runs[shown]):.0f}", f"{limit * tokens_a_step:.0f}", f"{tokens_a_step:.2f}"]
    cells += [_accepted(runs[shown]), _to_best(case, names)]
    return cells


def _beside_aim(case: Case, name: str) -> str:
    """The ratio, bold where an aim is missed."""
    values = ratios(case, name)
    aim = AIMS.get((case["kind"], case["weights"], case["batch"]))
    reached = bounds(values)[0] >= LEAST if aim is None else statistics.median(values) >= aim
    text = interval(values)
    return text if reached else f"**{text}**"


def _to_best(case: Case, names: Mapping[str, str]) -> str:
    fixed = [name for number, name in names.items() if number != AUTO]
    if AUTO not in names or not fixed:
        return ""
    best = max(fixed, key=lambda name: statistics.median(ratios(case, name)))
    values = ratios(case, names[AUTO], best)
    text = interval(values)
    return text if bounds(values)[0] >= LEAST else f"**{text}**"


def _accepted(runs: Sequence[Run]) -> str:
    """The part of the drafts' tokens that was right, by position, of those that were compared."""
    parts = []
    for at in range(3):
        tried, right = (
            sum(run[key][at] for run in runs if at < len(run[key]))
            for key in ("tried_at", "accepted_at")
        )
        if tried:
            parts.append(f"{right / tried:.2f}")
    return ", ".join(parts)


def _limit(case: Case) -> float:
    """Tokens a second if each step read all weights once and did nothing else."""
    gb_s = case["machine"][f"read_gb_s_{case['threads']}t"]
    return float(case["batch"] * gb_s * 1e9 / case["weights_bytes"])


def _caption(cases: Sequence[Case], data: str) -> str:
    rounds = {len(case["runs"][PLAIN]) for case in cases}
    machines = {f"{case['cpu']}, threads: {case['threads']}, {case['clock']}" for case in cases}
    loads = [case["load_before"] for case in cases]
    return (
        f"Medians of {_range(rounds)} rounds, and the interval that holds the true one with"
        f" {CONFIDENCE:.0%}; bold: below what is aimed at. Speed, tokens a step, and the part of the"
        f" compared tokens that was right are of the last number in the row ({AUTO} where it was"
        " measured). The limit is that of reading all weights once a step, times the tokens of a step."
        f" SmolLM2-135M, greedy, answers of at most {_range({case['max_tokens'] for case in cases})}"
        f" tokens; {'; '.join(sorted(machines))}; load of the machine before it:"
        f" {min(loads):.1f} to {max(loads):.1f}. Data: `results/{data}`."
    )


def _range(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _numbers(cases: Sequence[Case]) -> list[str]:
    """All numbers of tokens, `AUTO` last."""
    found = {name.rpartition(", ")[2] for case in cases for name in case["runs"] if name != PLAIN}
    return [*sorted(found - {AUTO}, key=int), *({AUTO} & found)]


def _drafters(case: Case) -> Iterator[str]:
    yield from dict.fromkeys(name.rpartition(", ")[0] for name in case["runs"] if name != PLAIN)


def _order(case: Case) -> tuple[str, str, int]:
    return case["kind"], case["weights"], case["batch"]


def _rate(run: Run) -> float:
    return float(run["num_decoded"] / run["decode_s"])


def _speed(runs: Sequence[Run]) -> float:
    return _sum(runs, "num_decoded") / _sum(runs, "decode_s")


def _sum(runs: Sequence[Run], key: str) -> float:
    return float(sum(run[key] for run in runs))
