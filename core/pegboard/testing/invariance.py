"""The matrix of exactness: the same prompts, run in many ways, give the same tokens and logprobs.

A `Case` is a way to run: how many sequences at once, how many tokens a step, how much KV memory, in
which order. `run_case` runs prompts in that way; `differences` compares two runs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegboard import Engine
from pegboard.interfaces.scheduler import QueueView, Scheduler, SequenceView, StepBuilder
from pegboard.request import SamplingParams

BATCHES = (1, 2, 3, 5, 7, 17, 33)
CHUNKS = (1, 7, 64, None)


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run the same prompts.

    Attributes:
        batch: most sequences that run at once.
        chunk: most tokens a step; None: all that there are.
        pool: size of the KV pool in bytes, small enough to preempt; None: plenty.
        disorder: seed of random order, chunk sizes and preemptions; None: the config's scheduler.
        settings: further config keys (`{"prefix_cache": "on"}`).
    """

    batch: int
    chunk: int | None = None
    pool: int | None = None
    disorder: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        chunk = "all" if self.chunk is None else str(self.chunk)
        parts = [f"batch {self.batch}", f"chunk {chunk}"]
        if self.pool is not None:
            parts.append(f"pool {self.pool}")
        if self.disorder is not None:
            parts.append(f"disorder {self.disorder}")
        return ", ".join([*parts, *(f"{key} {value}" for key, value in self.settings.items())])

    def config(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The base config, run in this way."""
        chunk = self.chunk or 2048
        scheduler = {"max_num_seqs": self.batch, "max_num_batched_tokens": max(chunk, self.batch)}
        kv_cache = {**base.get("kv_cache", {})}
        if self.pool is not None:
            kv_cache["memory"] = self.pool
        return {**base, **self.settings, "scheduler": scheduler, "kv_cache": kv_cache}


@dataclass(frozen=True, slots=True)
class Trace:
    """What one sequence became.

    Attributes:
        tokens: generated ids.
        logprobs: of each, and of the most likely ones, flattened; empty where not asked for.
        finish_reason: why it ended.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


Traces = dict[tuple[int, int], Trace]
"""(prompt, sequence) to what it became."""


def run_case(
    config: Mapping[str, Any],
    case: Case,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    **objects: Any,
) -> Traces:
    """Runs all prompts in one engine, in the case's way.

    Args:
        config: keys common to all cases.
        case: how to run.
        prompts: token ids.
        params: one for each prompt.
        objects: interface name to an object, as for `Engine`.
    """
    if case.disorder is not None:
        objects["scheduler"] = Disorder(case.disorder, case.chunk)
    with Engine(case.config(config), **objects) as engine:
        numbers = {
            engine.submit(prompt, one).request_id: number
            for number, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        }
        gathered: dict[tuple[int, int], list[Any]] = {}
        while engine.has_work():
            for delta in engine.step():
                gathered.setdefault((numbers[delta.request_id], delta.index), []).append(delta)
    return {key: _trace(deltas) for key, deltas in gathered.items()}


def _trace(deltas: Sequence[Any]) -> Trace:
    tokens = tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas))
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    logprobs = tuple(x for entry in entries for x in (entry.logprob, *entry.top_logprobs))
    return Trace(tokens, logprobs, deltas[-1].finish_reason)


def differences(expected: Traces, got: Traces, tolerance: float = 0.0) -> list[str]:
    """A line for each sequence whose tokens, end, or logprobs (by more than tolerance) differ."""
    lines = [f"{key}: missing" for key in expected.keys() - got.keys()]
    lines += [f"{key}: unexpected" for key in got.keys() - expected.keys()]
    for key in sorted(expected.keys() & got.keys()):
        mine, theirs = expected[key], got[key]
        if mine.tokens != theirs.tokens:
            at = next(
                i for i in itertools.count() if mine.tokens[: i + 1] != theirs.tokens[: i + 1]
            )
            lines.append(f"{key}: tokens part at {at}: {mine.tokens[at:]} {theirs.tokens[at:]}")
        elif mine.finish_reason != theirs.finish_reason:
            lines.append(f"{key}: ends by {mine.finish_reason}, {theirs.finish_reason}")
        elif len(mine.logprobs) != len(theirs.logprobs):
            lines.append(f"{key}: {len(mine.logprobs)} logprobs, {len(theirs.logprobs)}")
        else:
            pairs = zip(mine.logprobs, theirs.logprobs, strict=True)
            worst = max((abs(a - b) for a, b in pairs if a != b), default=0.0)
            if not worst <= tolerance:
                lines.append(f"{key}: logprobs differ by {worst}")
    return lines


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Few combinations that hold every pair of values of two axes at least once."""
    names = list(axes)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in axes[a]
        for y in axes[b]
    }
    everything = [dict(zip(names, row, strict=True)) for row in itertools.product(*axes.values())]
    random.Random(seed).shuffle(everything)
    while missing:
        best = max(everything, key=lambda row: len(_pairs(row, names) & missing))
        missing -= _pairs(best, names)
        yield best


def _pairs(row: Mapping[str, Any], names: Sequence[str]) -> set[Any]:
    return {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)}


class Disorder(Scheduler):
    """A scheduler that no engine should have: random order, random chunks, random preemptions.

    Args:
        seed: of the disorder.
        chunk: most tokens of one sequence a step; None: as many as fit.
    """

    def __init__(self, seed: int, chunk: int | None = None) -> None:
        self._random = random.Random(seed)
        self._chunk = chunk or 64

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        running, waiting = list(queue.running), list(queue.waiting)
        if running and self._random.random() < 0.15:
            victim = self._random.choice(running)
            if step.preempt(victim):
                running.remove(victim)
        everyone = running + waiting
        self._random.shuffle(everyone)
        planned = [seq for seq in everyone if step.add(seq, self._size())]
        if not planned:
            self._make_room(running, step)

    def _size(self) -> int:
        return self._random.randint(1, self._chunk)

    def _make_room(self, running: Sequence[SequenceView], step: StepBuilder) -> None:
        """Nothing fitted: preempts, youngest first, until something does."""
        for victim in reversed(running):
            if any(step.add(seq, self._size()) for seq in running if seq is not victim):
                return
            step.preempt(victim)
        for seq in running:
            if step.add(seq, 1):
                return
