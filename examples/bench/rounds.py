"""Rounds in which engines take turns, and what is said of their runs.

In each round every engine runs every case, in an order that turns; a ratio compares two runs of one
round, so that what the machine does meanwhile meets both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from math import comb
from pathlib import Path
from typing import Any

from peer_process import MODELS, PEERS, PeerProcess

CASES = ("1x128x64", "8x128x64", "32x128x64")
PARTS = ("total", "decode", "prefill")
CONFIDENCE = 0.95

Run = dict[str, Any]
"""A peer's answer to a case: seconds of each part, and the like."""

Runs = dict[str, dict[str, list[Run]]]
"""Case to name to one run a round."""


def round_options(description: str | None, peers: Iterable[str]) -> argparse.ArgumentParser:
    """A parser of what every bench of rounds can be told.

    Args:
        description: of the bench; its first line is shown.
        peers: names that `--peer` allows.
    """
    parser = argparse.ArgumentParser(
        description=description.splitlines()[0] if description else None
    )
    names = tuple(peers)

    def peer(text: str) -> tuple[str, str]:
        name, _, python = text.partition("=")
        if name not in names or not python:
            allowed = f"NAME=PYTHON of {', '.join(names)}"
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: {allowed}")
        return name, python

    parser.add_argument("--case", action="append", help="BATCHxPROMPTxGENERATED; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peer", action="append", default=[], type=peer, help="NAME=PYTHON")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="processor time: on a busy machine, with --threads 1",
    )
    parser.add_argument("--models", type=Path, default=MODELS)
    return parser


def started(
    name: str, python: str, what: tuple[str, str, str], options: argparse.Namespace
) -> PeerProcess:
    """A peer that waits for its cases.

    Args:
        name: for messages.
        python: interpreter of its environment.
        what: its script (`peers/peer_SCRIPT.py`), its model as `prepare_model.py` writes it, its dtype.
        options: of `round_options`.
    """
    script, model, dtype = what
    arguments = ["--model", str(options.models / model), "--dtype", dtype]
    arguments += ["--threads", str(options.threads)]
    for case in options.case:
        arguments += ["--case", case]
    return PeerProcess(name, python, script, arguments)


def take_turns(peers: Sequence[PeerProcess], options: argparse.Namespace) -> Runs:
    """Runs all cases in all rounds."""
    prefix = "cpu_" if options.cpu_time else ""
    cases: Runs = {case: {peer.name: [] for peer in peers} for case in options.case}
    for number in range(options.rounds):
        for case in options.case:
            turn = number % len(peers)
            for peer in [*peers[turn:], *peers[:turn]]:
                run = peer.ask({"case": case, "run": number})
                parts = {part: run[f"{prefix}{part}_s"] for part in PARTS}
                kept = {"tokens": run["tokens"][:8], "peak_rss_mb": run["peak_rss_mb"]}
                cases[case][peer.name].append(parts | kept)
                print(number, case, peer.name, f"{parts['total']:.2f} s", file=sys.stderr)
    return cases


def machine_limits() -> dict[str, Any]:
    """The limits of this machine, as `peers/machine.py` measures them."""
    output = subprocess.run(
        [sys.executable, str(PEERS / "machine.py")], check=True, capture_output=True, text=True
    ).stdout
    limits: dict[str, Any] = json.loads(output)
    return limits


def sizes(case: str) -> tuple[int, int, int]:
    """A case's batch, prompt and generated tokens."""
    batch, prompt_len, gen_len = (int(size) for size in case.split("x"))
    return batch, prompt_len, gen_len


def num_tokens(case: str) -> dict[str, int]:
    """Tokens of each part of a case; decoding begins after the first."""
    batch, prompt_len, gen_len = sizes(case)
    return {
        "total": batch * gen_len,
        "decode": batch * (gen_len - 1),
        "prefill": batch * prompt_len,
    }


def rates(case: str, runs: Sequence[Run]) -> dict[str, float]:
    """Tokens a second of each part, by the median of the rounds."""
    return {
        part: count / statistics.median(run[part] for run in runs)
        for part, count in num_tokens(case).items()
    }


def ratios(ours: Sequence[Run], theirs: Sequence[Run], part: str) -> list[float]:
    """Our speed to theirs in each round."""
    return [their[part] / our[part] for our, their in zip(ours, theirs, strict=True)]


def ratio(ours: Sequence[Run], theirs: Sequence[Run], part: str) -> str:
    """Median of the rounds' ratios, with the smallest and the largest."""
    values = ratios(ours, theirs, part)
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def interval(values: Sequence[float]) -> str:
    """The median, and the bounds between which the true one lies."""
    low, high = bounds(values)
    return f"{statistics.median(values):.3f} ({low:.3f} to {high:.3f})"


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """The order statistics between which the true median lies with `CONFIDENCE`."""
    ordered, count = sorted(values), len(values)
    outside, cut = 0.0, 0
    while cut < (count - 1) // 2:
        outside += 2 * comb(count, cut) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        cut += 1
    return ordered[max(cut - 1, 0)], ordered[count - max(cut, 1)]


def peaks(cases: Runs, names: Sequence[str]) -> str:
    """Each engine's most resident memory over all cases."""
    most = {
        name: max(run["peak_rss_mb"] for case in cases.values() for run in case[name])
        for name in names
    }
    return ", ".join(f"{name} {peak:.0f}" for name, peak in most.items())
