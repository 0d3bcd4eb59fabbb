"""The matrix of exactness: the same prompts, run in many ways, give the same tokens and logprobs.

A `Case` is a way to run: how many sequences at once, how many tokens a step, how much KV memory, in
which order, with which guesses, whether known prefixes are served from a cache, and on which plugins.
`run_case` runs prompts in that way; `differences` compares two runs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from pegboard import Engine
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.prefix_cache import PrefixCacheContext
from pegboard.interfaces.scheduler import Scheduler
from pegboard.request import (
    FinishReason,
    JoinedDeltas,
    SamplingParams,
    SequenceDelta,
    TokenLogprob,
)
from pegboard.testing.dict_cache import DictCache
from pegboard.testing.guessing_drafter import GuessingDrafter
from pegboard.testing.odd_schedulers import Chunked, Disorder, InOrder, Interrupted

BATCHES = (1, 2, 3, 5, 7, 17, 33)
CHUNKS = (1, 7, 64, None)


def various_prompts(lengths: Sequence[int], token_ids: range) -> tuple[tuple[int, ...], ...]:
    """Random prompts of those lengths; those longer than 20 tokens begin alike."""
    dice = random.Random(5)

    def some(count: int) -> list[int]:
        return [dice.randrange(token_ids.start, token_ids.stop) for _ in range(count)]

    known = some(20)
    return tuple(tuple((known if n > 20 else []) + some(n))[:n] for n in lengths)


def various_params(num_prompts: int) -> list[SamplingParams]:
    """In turn greedy, nine samples with a seed, and sampled with filters; 6 tokens with logprobs."""
    common: dict[str, Any] = {"max_tokens": 6, "logprobs": 2, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11, "n": 9},
        {"temperature": 0.8, "seed": 5, "top_p": 0.8, "top_k": 50},
    ]
    return [SamplingParams(**common, **kinds[i % 3]) for i in range(num_prompts)]


@dataclass(frozen=True, slots=True)
class Guesses:
    """The guesses of a drafter, from 1 (all right) to 0 (all wrong).

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
        guesses: of a drafter that knows the tokens to come; None: no drafter.
        arrivals: prompts that arrive before each step; None: all of them before the first.
        interruptions: seed of random preemptions beside the scheduler's own; None: none.
        cached: whether a `DictCache` serves what it knows; for models with one KV group, and a
            `kv_cache.block_size` in the config.
        settings: further config keys (`{"numerics": "invariant"}`); those of `scheduler` and
            `kv_cache` stand beside what the case says there.
    """

    batch: int
    chunk: int | None = None
    budget: int = 2048
    pool: int | None = None
    disorder: int | None = None
    guesses: Guesses | None = None
    arrivals: int | None = None
    interruptions: int | None = None
    cached: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = {"batch": self.batch, "chunk": self.chunk or "all", "budget": self.budget}
        options = {
            "pool": self.pool,
            "disorder": self.disorder,
            "guesses": self.guesses,
            "arrivals": self.arrivals,
            "interruptions": self.interruptions,
            "cached": self.cached or None,
            **self.settings,
        }
        said |= {key: value for key, value in options.items() if value is not None}
        return ", ".join(f"{key} {value}" for key, value in said.items())

    def config(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The base config, run in this way."""
        config = {**base, **self.settings}
        config["scheduler"] = {
            **self.settings.get("scheduler", {}),
            "max_num_seqs": self.batch,
            "max_num_batched_tokens": self.budget,
        }
        config["kv_cache"] = {**base.get("kv_cache", {}), **self.settings.get("kv_cache", {})}
        if self.pool is not None:
            config["kv_cache"]["memory"] = self.pool
        if self.cached:
            config["prefix_cache"] = "auto"  # an object is given for it
        if self.guesses is not None:
            config["drafter"] = {
                "name": GuessingDrafter.__name__,
                "num_speculative_tokens": self.guesses.num_nodes,
            }
        return config


@dataclass(frozen=True, slots=True)
class Trace:
    """The outcome of one sequence.

    Attributes:
        tokens: generated ids.
        logprobs: of each, and of the most likely ones, flattened; empty where not asked for.
        finish_reason: why it ended.
        stop_reason: see `SequenceDelta`.
        text: of a model with a tokenizer.
        prompt_logprobs: of its request, flattened as the others.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    text: str = ""
    prompt_logprobs: tuple[float, ...] = ()


Traces = dict[tuple[int, int], Trace]
"""(prompt, sequence) to its outcome."""


def run_case(
    config: Mapping[str, Any],
    case: Case,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    known: Traces | None = None,
    fields: Sequence[Mapping[str, Any]] | None = None,
    may_be_cut_off: Collection[str] = (),
    **objects: Any,
) -> Traces:
    """Runs all prompts in one engine, in the case's way.

    Args:
        config: keys common to all cases.
        case: how to run.
        prompts: token ids.
        params: one for each prompt.
        known: the outcome of each sequence, for cases with guesses.
        fields: for each prompt, further arguments of `Engine.submit` (`priority`, `cache_salt`).
        may_be_cut_off: interfaces whose plugin may err, so that the engine does without it.
        objects: interface name to an object, as for `Engine`. Without one, and without a name, the policy
            of drafts is `fixed`. A chunk and interruptions are added to
            a scheduler that is given, disorder takes its place; without one it is this module's own.

    Raises:
        AssertionError: a plugin of another interface was cut off, so that another one ran in its place.
    """
    objects = {**_objects(config, case, prompts, known), **objects}
    scheduler = _scheduler(case, objects.get("scheduler"))
    if scheduler is not None:
        objects["scheduler"] = scheduler
    asked = case.config(config)
    if isinstance(asked.get("drafter"), Mapping) and "speculation_policy" not in objects:
        # All nodes are verified, whatever that costs.
        asked["drafter"] = {"policy": "fixed", **asked["drafter"]}
    with Engine(asked, **objects) as engine:
        numbers: dict[str, int] = {}
        gathered: dict[tuple[int, int], JoinedDeltas] = {}
        to_come = list(zip(prompts, params, fields or [{}] * len(prompts), strict=True))
        while to_come or engine.has_work():
            count = case.arrivals or len(to_come)
            for prompt, one, more in to_come[:count]:
                numbers[engine.submit(prompt, one, **more).request_id] = len(numbers)
            del to_come[:count]
            for delta in engine.step():
                sequence = numbers[delta.request_id], delta.index
                gathered.setdefault(sequence, JoinedDeltas()).add(delta)
        cut_off = [one for one in engine.core.cut_off if one.part not in may_be_cut_off]
        assert not cut_off, cut_off
    wholes = {key: deltas.delta() for key, deltas in gathered.items()}
    # They come with whichever sequence of their request is the first to have a token.
    of_prompts = {key[0]: one.prompt_logprobs for key, one in wholes.items() if one.prompt_logprobs}
    return {key: _trace(one, of_prompts.get(key[0], ())) for key, one in wholes.items()}


def _scheduler(case: Case, given: Scheduler | None) -> Scheduler | None:
    """The scheduler that the case asks for, around the one given; None: the config's."""
    if case.disorder is not None:
        scheduler: Scheduler | None = Disorder(case.disorder, case.chunk)
    elif case.chunk is not None:
        scheduler = Chunked(given or InOrder(), case.chunk)
    else:
        scheduler = given
    if case.interruptions is not None:
        scheduler = Interrupted(scheduler or InOrder(), case.interruptions)
    return scheduler


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


def _trace(whole: SequenceDelta, of_prompt: Sequence[TokenLogprob | None]) -> Trace:
    return Trace(
        whole.token_ids,
        _flat(whole.logprobs or ()),
        whole.finish_reason,
        whole.stop_reason,
        whole.text,
        _flat(of_prompt),
    )


def _flat(logprobs: Sequence[TokenLogprob | None]) -> tuple[float, ...]:
    """Of each, and of the most likely ones."""
    return tuple(x for one in logprobs if one for x in (one.logprob, *one.top_logprobs))


def differences(expected: Traces, got: Traces, tolerance: float = 0.0) -> list[str]:
    """A line for each sequence whose tokens, end, text, or logprobs (by more than tolerance) differ."""
    lines = [f"{key}: missing" for key in expected.keys() - got.keys()]
    lines += [f"{key}: unexpected" for key in got.keys() - expected.keys()]
    for key in sorted(expected.keys() & got.keys()):
        mine, theirs = expected[key], got[key]
        if mine.tokens != theirs.tokens:
            at = next(
                i for i in itertools.count() if mine.tokens[: i + 1] != theirs.tokens[: i + 1]
            )
            lines.append(f"{key}: tokens part at {at}: {mine.tokens[at:]} {theirs.tokens[at:]}")
        elif (mine.finish_reason, mine.stop_reason) != (theirs.finish_reason, theirs.stop_reason):
            ends = [f"{one.finish_reason} {one.stop_reason!r}" for one in (mine, theirs)]
            lines.append(f"{key}: ends by {ends[0]}, {ends[1]}")
        elif mine.text != theirs.text:
            lines.append(f"{key}: texts differ: {mine.text!r} {theirs.text!r}")
        else:
            lines += _logprobs_that_differ(f"{key}: ", mine.logprobs, theirs.logprobs, tolerance)
            of_prompts = mine.prompt_logprobs, theirs.prompt_logprobs
            lines += _logprobs_that_differ(f"{key}: prompt ", *of_prompts, tolerance)
    return lines


def _logprobs_that_differ(
    whose: str, mine: Sequence[float], theirs: Sequence[float], tolerance: float
) -> Iterator[str]:
    if len(mine) != len(theirs):
        yield f"{whose}{len(mine)} logprobs, {len(theirs)}"
        return
    worst = max((abs(a - b) for a, b in zip(mine, theirs, strict=True) if a != b), default=0.0)
    if not worst <= tolerance:
        yield f"{whose}logprobs differ by {worst}"


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Few combinations that hold every pair of values of two axes at least once."""
    dice = random.Random(seed)
    missing = {
        ((a, x), (b, y)): None
        for a, b in itertools.combinations(sorted(axes), 2)
        for x in axes[a]
        for y in axes[b]
    }
    while missing:
        first = next(iter(missing))
        rows = [_row(axes, dict(first), missing.keys(), dice) for _ in range(_NUM_CANDIDATES)]
        best = max(rows, key=lambda row: len(_pairs(row) & missing.keys()))
        for pair in _pairs(best):
            missing.pop(pair, None)
        yield best


_NUM_CANDIDATES = 30
"""Combinations among which `pairwise` chooses the one that holds most of what is missing."""


def _row(
    axes: Mapping[str, Sequence[Any]],
    row: dict[str, Any],
    missing: Set[Any],
    dice: random.Random,
) -> dict[str, Any]:
    """Completes a combination, an axis after the other in random order, by the value that brings most
    of the missing pairs."""
    for name in dice.sample(list(axes), len(axes)):
        if name not in row:
            values = dice.sample(axes[name], len(axes[name]))
            news = [len(_pairs({**row, name: value}) & missing) for value in values]
            row[name] = values[news.index(max(news))]
    return {name: row[name] for name in axes}


def _pairs(row: Mapping[str, Any]) -> set[Any]:
    """All pairs of settings, those of one pair by name."""
    return set(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2))
