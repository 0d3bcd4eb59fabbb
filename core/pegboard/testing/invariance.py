"""The matrix of exactness: the same prompts, run in many ways, give the same tokens and logprobs.

A `Case` is a way to run: how many sequences at once, how many tokens a step, how much KV memory, in
which order, with which guesses and whether known prefixes are served from a cache. `run_case` runs
prompts in that way; `differences` compares two runs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegboard import Engine
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.prefix_cache import PrefixCacheContext
from pegboard.interfaces.scheduler import QueueView, Scheduler, SequenceView, StepBuilder
from pegboard.request import SamplingParams
from pegboard.testing.dict_cache import DictCache
from pegboard.testing.guessing_drafter import GuessingDrafter

BATCHES = (1, 2, 3, 5, 7, 17, 33)
CHUNKS = (1, 7, 64, None)


@dataclass(frozen=True, slots=True)
class Guesses:
    """What a drafter guesses, from 1 (all right) to 0 (all wrong).

    Attributes:
        right: share of depths at which the right token is among the guesses.
        width: guesses a depth: 1 makes chains, more make trees.
        num_nodes: most nodes a row.
    """

    right: float
    width: int = 1
    num_nodes: int = 6


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run the same prompts.

    Attributes:
        batch: most sequences that run at once.
        chunk: most tokens of one sequence a step, its drafts not counted; None: as many as fit.
        budget: most tokens a step, all sequences and drafts together.
        pool: size of the KV pool in bytes, small enough to preempt; None: plenty.
        disorder: seed of random order, chunk sizes and preemptions; None: in order.
        guesses: of a drafter that knows what comes; None: no drafter.
        cached: whether a prefix cache serves what it knows; for models with one KV group, and a
            `kv_cache.block_size` in the config.
        settings: further config keys (`{"numerics": "invariant"}`).
    """

    batch: int
    chunk: int | None = None
    budget: int = 2048
    pool: int | None = None
    disorder: int | None = None
    guesses: Guesses | None = None
    cached: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = {"batch": self.batch, "chunk": self.chunk or "all", "budget": self.budget}
        options = {
            "pool": self.pool,
            "disorder": self.disorder,
            "guesses": self.guesses,
            "cached": self.cached or None,
            **self.settings,
        }
        said |= {key: value for key, value in options.items() if value is not None}
        return ", ".join(f"{key} {value}" for key, value in said.items())

    def config(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The base config, run in this way."""
        config = {**base, **self.settings}
        config["scheduler"] = {"max_num_seqs": self.batch, "max_num_batched_tokens": self.budget}
        config["kv_cache"] = {**base.get("kv_cache", {})}
        if self.pool is not None:
            config["kv_cache"]["memory"] = self.pool
        if self.guesses is not None:
            config["drafter"] = {
                "name": GuessingDrafter.__name__,
                "num_speculative_tokens": self.guesses.num_nodes,
            }
        return config


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
    known: Traces | None = None,
    **objects: Any,
) -> Traces:
    """Runs all prompts in one engine, in the case's way.

    Args:
        config: keys common to all cases.
        case: how to run.
        prompts: token ids.
        params: one for each prompt.
        known: what each sequence becomes, for cases with guesses.
        objects: interface name to an object, as for `Engine`. A chunk or disorder is added to a
            scheduler that is given; without one it is this module's own.
    """
    objects = {**_objects(config, case, prompts, known), **objects}
    if case.disorder is not None:
        objects["scheduler"] = Disorder(case.disorder, case.chunk)
    elif case.chunk is not None:
        objects["scheduler"] = Chunked(objects.get("scheduler") or InOrder(), case.chunk)
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


def _objects(
    config: Mapping[str, Any],
    case: Case,
    prompts: Sequence[Sequence[int]],
    known: Traces | None,
) -> dict[str, Any]:
    """The drafter and the cache that the case asks for."""
    objects: dict[str, Any] = {}
    if case.guesses is not None:
        assert known is not None, "guesses need to know what comes"
        outputs = {(tuple(prompts[key[0]]), key[1]): trace.tokens for key, trace in known.items()}
        objects["drafter"] = GuessingDrafter(outputs, case.guesses.right, case.guesses.width)
    if case.cached:
        size = int(config["kv_cache"]["block_size"])
        group = KVGroup((0,), 1, 1, size, None, "none", "float32")
        objects["prefix_cache"] = DictCache(PrefixCacheContext((group,), (1,), ""))
    return objects


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


class InOrder(Scheduler):
    """Running sequences first, in order; then those that wait, while they fit."""

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        planned = [seq for seq in queue.running if step.add(seq, seq.num_pending)]
        for seq in queue.waiting:
            if not step.add(seq, seq.num_pending):
                break
            planned.append(seq)
        if not planned:
            _make_room(queue.running, step, lambda seq: seq.num_pending)


class Chunked(Scheduler):
    """Another scheduler, whose plans get at most so many tokens of one sequence a step."""

    def __init__(self, inner: Scheduler, chunk: int) -> None:
        self._inner = inner
        self._chunk = chunk

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        self._inner.plan(queue, _CuttingStep(step, self._chunk))


class _CuttingStep(StepBuilder):
    """Cuts what is added. KV for the rest is asked for as a reserve, as it was."""

    def __init__(self, step: StepBuilder, chunk: int) -> None:
        self._step = step
        self._chunk = chunk

    @property
    def num_tokens_left(self) -> int:
        return self._step.num_tokens_left

    @property
    def num_rows_left(self) -> int:
        return self._step.num_rows_left

    def add(self, seq: SequenceView, num_tokens: int, reserve: int = 0) -> bool:
        cut = max(0, min(num_tokens, seq.num_pending) - self._chunk)
        return self._step.add(seq, num_tokens - cut, reserve + cut)

    def waits_for_prefix(self, seq: SequenceView) -> bool:
        return self._step.waits_for_prefix(seq)

    def preempt(self, seq: SequenceView) -> bool:
        return self._step.preempt(seq)


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
            _make_room(running, step, lambda seq: self._size())

    def _size(self) -> int:
        return self._random.randint(1, self._chunk)


def _make_room(
    running: Sequence[SequenceView], step: StepBuilder, size: Callable[[SequenceView], int]
) -> None:
    """Nothing fitted: preempts, youngest first, until something does."""
    for victim in reversed(running):
        if any(step.add(seq, size(seq)) for seq in running if seq is not victim):
            return
        step.preempt(victim)
    for seq in running:
        if step.add(seq, 1):
            return
