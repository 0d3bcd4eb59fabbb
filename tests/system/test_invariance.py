"""No way of running changes a token: batches, chunks, preemptions, disorder, guesses, cached prefixes,
schedulers and allocators.

In float64 on tiny models, where rounding cannot hide or excuse a fault of the logic.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pegboard import Config
from pegboard.compose import prepare
from pegboard.interfaces.observer import BlocksNamed, Event, Observer, StepDone
from pegboard.interfaces.scheduler import Scheduler, SchedulerContext
from pegboard.plugins.loader import load_plugins, options_of
from pegboard.request import SamplingParams
from pegboard.testing.invariance import (
    BATCHES,
    CHUNKS,
    Case,
    Guesses,
    Traces,
    differences,
    pairwise,
    run_case,
)

MAX_MODEL_LEN = 64
BLOCK_SIZE = 4
DEPTHS = (1, 2)
"""Most steps in flight."""
NUM_FEW = 8
"""Prompts that hold each kind of params once, and begin alike in part: half the work of all."""
NEEDS_PREEMPTION = 2 * 2 * 24 * 8 * (MAX_MODEL_LEN + 40)
"""Bytes of KV of little more than one longest sequence: layers x (k, v) x head x float64 x tokens."""

WAYS: dict[str, dict[str, Any]] = {
    "plenty": {},
    "tight budget": {"budget": 40},
    "small pool": {"pool": NEEDS_PREEMPTION},
    "one after the other": {"arrivals": 1, "pool": NEEDS_PREEMPTION},
    "interrupted": {"interruptions": 1},
    "interrupted in a small pool": {"interruptions": 2, "pool": NEEDS_PREEMPTION},
}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "priority": {"max_wait": 0.01},
    "prefix_aware": {"window": 5, "max_overtakes": 2},
    "fair": {"weights": {"a": 3.0}},
    "reserve": {},
    "shortest": {"max_wait": 0.01},
    "static": {},
}
"""Name to options under which each of their rules has its turn among a few sequences."""
DISORDER = "disorder"
"""A scheduler too, of `pegboard.testing`."""
KV: dict[str, dict[str, Any]] = {
    "paged": {},
    "paged, dict": {"cached": True},
    "paged, trie lru": {"cache": {"name": "trie", "options": {"eviction": "lru"}}},
    "paged, trie priority": {"cache": {"name": "trie", "options": {"eviction": "priority"}}},
    "contiguous": {"allocator": "contiguous"},
}
"""An allocator, and a prefix cache that it serves."""
PACKAGES = {
    "pegboard_prefix_cache": ("paged, trie lru", "paged, trie priority"),
    "pegboard_schedulers": ("priority", "prefix_aware", "fair", "reserve", "shortest"),
    "pegboard_baselines": ("static", "contiguous"),
}
"""Settings that come with a plugin."""
GUESSES: dict[str, Guesses | None] = {
    "none": None,
    "right chains": Guesses(1.0),
    "wrong chains": Guesses(0.0),
    "mixed chains": Guesses(0.6),
    "right trees": Guesses(1.0, width=2),
    "wrong trees": Guesses(0.0, width=3),
    "mixed trees": Guesses(0.6, width=2),
}
AXES: dict[str, tuple[Any, ...]] = {
    "batch": BATCHES,
    "chunk": CHUNKS,
    "way": tuple(WAYS),
    "guesses": tuple(GUESSES),
    "scheduler": (*SCHEDULERS, DISORDER),
    "kv": tuple(KV),
    "depth": DEPTHS,
}
PLAINLY: dict[str, Any] = {"guesses": "none", "scheduler": "fcfs", "kv": "paged", "depth": 1}

PAIRWISE = list(pairwise(AXES))
PLAIN = [
    PLAINLY | {"batch": batch, "chunk": chunk, "way": way, "scheduler": scheduler, "depth": depth}
    for batch, chunk, (scheduler, way), depth in itertools.product(
        BATCHES,
        CHUNKS,
        [*(("fcfs", way) for way in WAYS), (DISORDER, "plenty"), (DISORDER, "small pool")],
        DEPTHS,
    )
]
EVERY_GUESS = [
    PLAINLY
    | {"batch": batch, "chunk": chunk, "way": way, "guesses": guesses, "kv": kv, "depth": depth}
    for batch, (chunk, way, guesses, kv, depth) in zip(
        itertools.cycle(BATCHES[::-1]),
        itertools.product(CHUNKS, WAYS, GUESSES, ("paged", "paged, dict"), DEPTHS),
        strict=False,
    )
]
"""Every chunk x way x guesses x cache x depth, each at one batch."""
EVERY_PLUGIN = [
    PLAINLY
    | {"batch": batch, "chunk": chunk, "scheduler": scheduler, "kv": kv, "way": way, "depth": depth}
    for batch, chunk, (scheduler, kv, way, depth) in zip(
        itertools.cycle(BATCHES[::-1]),
        # Of another length than the batches, so that each meets each.
        itertools.cycle((None, 7, 1, None, 64)),
        itertools.product(AXES["scheduler"], KV, WAYS, DEPTHS),
        strict=False,
    )
]
"""Every scheduler x allocator and cache x way x depth, at batches and chunks in turn."""


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Of many lengths; the longer ones begin alike."""
    random_ids = random.Random(3)
    lengths = [1, 2, 3, 40, 17, 16, 15, 8, 9, 33, 5, 24, 1, 31, 12, 7, 20]
    known = [random_ids.randrange(2, 517) for _ in range(13)]
    listed = []
    for length in lengths:
        beginning = known if length > len(known) else []
        rest = [random_ids.randrange(2, 517) for _ in range(length - len(beginning))]
        listed.append(tuple(beginning + rest))
    return tuple(listed)


def params() -> list[SamplingParams]:
    """Greedy, and sampled with seeds; one or three sequences; filters, penalties, stops: 33 in all."""
    common = {"max_tokens": 10, "logprobs": 3}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11, "n": 3},
        {"temperature": 1.0, "seed": 2**64 - 1},
        {"temperature": 0.7, "seed": 5, "top_p": 0.8, "top_k": 50, "n": 3},
        {"temperature": 0.0, "repetition_penalty": 1.2, "ignore_eos": True},
        {"temperature": 1.3, "seed": 6, "min_p": 0.02, "n": 3, "presence_penalty": 0.5},
        {"temperature": 1.0, "seed": 7, "stop_token_ids": tuple(range(2, 60)), "min_tokens": 4},
        {"temperature": 0.9, "seed": 8, "frequency_penalty": 0.6, "logit_bias": {5: 2.0}, "n": 3},
    ]
    chosen = [kinds[number % len(kinds)] for number in range(len(prompts()))]
    return [SamplingParams(**(common | kind)) for kind in chosen]


def fields() -> list[dict[str, Any]]:
    """Further fields of requests: three classes and tenants, two salts, not all of them reading
    what is cached, or leaving it."""
    modes = ("on", "read_only", "on", "on", "off")
    return [
        {
            "priority": number % 3 - 1,
            "tenant": "abc"[number * 7 % 3],
            "cache_salt": "apart" if number % 6 == 5 else "",
            "prefix_cache": modes[number % len(modes)],
        }
        for number in range(len(prompts()))
    ]


def config(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "max_model_len": MAX_MODEL_LEN,
        "dtype": "float64",
        "kv_cache": {"block_size": BLOCK_SIZE},
        "prefix_cache": "none",
        "threads": 1,
    }


_alone: dict[tuple[str, int | None], Traces] = {}


def alone(family: str, model: Path, num_prompts: int | None = None) -> Traces:
    """Each sequence of the first prompts by itself, a prompt in one piece; without a number, of all."""
    key, first = (family, num_prompts), slice(num_prompts)
    if key not in _alone:
        _alone[key] = run_case(config(model), Case(batch=1), prompts()[first], params()[first])
    return _alone[key]


def case_of(row: Mapping[str, Any]) -> Case:
    """A row of the matrix as a case; skips the test where a plugin of the row is not installed."""
    for package, names in PACKAGES.items():
        if row["scheduler"] in names or row["kv"] in names:
            pytest.importorskip(package)
    kv, settings = KV[row["kv"]], {"executor": {"depth": row["depth"]}}
    if "cache" in kv:
        settings["prefix_cache"] = kv["cache"]
    if "allocator" in kv:
        settings["kv_cache"] = {"allocator": kv["allocator"]}
    if row["scheduler"] != DISORDER:
        name = row["scheduler"]
        settings["scheduler"] = {"name": name, "options": SCHEDULERS[name]}
    return Case(
        row["batch"],
        row["chunk"],
        disorder=1 if row["scheduler"] == DISORDER else None,
        guesses=GUESSES[row["guesses"]],
        cached="cached" in kv,
        settings=settings,
        **WAYS[row["way"]],
    )


def scheduler_of(model: Path, case: Case) -> Scheduler:
    """The scheduler that the case's settings name, to be cut and interrupted."""
    settings = {"scheduler": case.settings["scheduler"]}
    named = Case(case.batch, budget=case.budget, settings=settings).config(config(model))
    composition = prepare(Config.from_values(named)).composition
    part = composition.parts["scheduler"]
    context = SchedulerContext(case.batch, case.budget, MAX_MODEL_LEN)
    made: Scheduler = load_plugins(composition.manifests).build(part, context, options_of(part))
    return made


def run(
    family: str, model: Path, case: Case, num_prompts: int | None = None, **objects: Any
) -> Traces:
    """The outputs of the first prompts in the case's way; without a number, of all."""
    known = alone(family, model, num_prompts)
    is_changed = case.chunk is not None or case.interruptions is not None
    if is_changed and case.disorder is None:
        objects["scheduler"] = scheduler_of(model, case)
        kept = {key: value for key, value in case.settings.items() if key != "scheduler"}
        case = replace(case, settings=kept)
    first = slice(num_prompts)
    asked = prompts()[first], params()[first]
    return run_case(config(model), case, *asked, known, fields()[first], **objects)


def check(
    family: str, models: Mapping[str, Path], row: Mapping[str, Any], num_prompts: int | None = None
) -> None:
    case = case_of(row)
    got = run(family, models[family], case, num_prompts)
    expected = alone(family, models[family], num_prompts)
    assert differences(expected, got, tolerance=1e-5) == [], str(case)


def test_the_prompts_run_33_sequences_that_differ(tiny_models: dict[str, Path]) -> None:
    traces = alone("llama", tiny_models["llama"])
    assert len(traces) == 33
    assert len({trace.tokens for trace in traces.values()}) > 30
    assert {"stop", "length"} == {trace.finish_reason for trace in traces.values()}


@pytest.mark.parametrize(
    "row",
    [
        row if number % 3 == 0 else pytest.param(row, marks=pytest.mark.slow)
        for number, row in enumerate(PAIRWISE)
    ],
    ids=str,
)
def test_pairs_of_ways_to_run(tiny_models: dict[str, Path], row: dict[str, Any]) -> None:
    """A few prompts, and all of them where so many run at once."""
    check("llama", tiny_models, row, None if row["batch"] > 2 * NUM_FEW else NUM_FEW)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("row", PAIRWISE[16::32], ids=str)
def test_other_families(tiny_models: dict[str, Path], family: str, row: dict[str, Any]) -> None:
    check(family, tiny_models, row, NUM_FEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "row"),
    [
        *(("llama", row) for row in PAIRWISE if row["batch"] <= 2 * NUM_FEW),
        *itertools.product(("mistral", "qwen2", "qwen3"), PAIRWISE[::16]),
    ],
    ids=str,
)
def test_pairs_of_ways_to_run_all_prompts(
    tiny_models: dict[str, Path], family: str, row: dict[str, Any]
) -> None:
    check(family, tiny_models, row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "row"),
    [
        *(("llama", row) for row in PLAIN),
        # An odd stride: each depth has its turn at every other way.
        *itertools.product(("mistral", "qwen2", "qwen3"), PLAIN[::3]),
    ],
    ids=str,
)
def test_every_batch_chunk_and_way(
    tiny_models: dict[str, Path], family: str, row: dict[str, Any]
) -> None:
    check(family, tiny_models, row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "row"),
    [
        *(("llama", row) for row in EVERY_GUESS),
        *(("mistral", row) for row in EVERY_GUESS[::7]),
    ],
    ids=str,
)
def test_every_guess_and_cache(
    tiny_models: dict[str, Path], family: str, row: dict[str, Any]
) -> None:
    check(family, tiny_models, row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "row"),
    [
        *(("llama", row) for row in EVERY_PLUGIN),
        *(("mistral", row) for row in EVERY_PLUGIN[::7]),
    ],
    ids=str,
)
def test_every_scheduler_allocator_and_cache(
    tiny_models: dict[str, Path], family: str, row: dict[str, Any]
) -> None:
    check(family, tiny_models, row)


class Counting(Observer):
    """Counts what the cases are there for."""

    def __init__(self) -> None:
        self.num_preempted = self.num_tried = self.num_accepted = 0
        self.num_steps = self.num_prefilled = self.most_prefilled = 0
        self.num_hit = self.num_evicted = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.num_steps += 1
            self.num_preempted += event.num_preempted
            self.num_tried += event.num_tried
            self.num_accepted += event.num_accepted
            self.num_prefilled += event.num_prefill_tokens
            self.most_prefilled = max(self.most_prefilled, event.num_prefill_tokens)
            self.num_hit += event.num_prefix_hits
        elif isinstance(event, BlocksNamed):
            self.num_evicted += len(event.evicted)

    def close(self) -> None:
        pass


def counted(model: Path, **row: Any) -> Counting:
    """The counts of a row; what it does not say is plain."""
    counting = Counting()
    case = case_of({"batch": 17, "chunk": None, "way": "plenty", **PLAINLY, **row})
    got = run("llama", model, case, observer=counting)
    assert differences(alone("llama", model), got, tolerance=1e-5) == []
    return counting


def test_every_pair_of_scheduler_and_kv_is_there() -> None:
    pairs = Counter((row["scheduler"], row["kv"]) for row in PAIRWISE)
    assert len(pairs) == (len(SCHEDULERS) + 1) * len(KV)
    assert len(PAIRWISE) < 80
    rows = {(row["scheduler"], row["kv"], row["way"], row["depth"]) for row in EVERY_PLUGIN}
    assert len(rows) == len(pairs) * len(WAYS) * len(DEPTHS)


@pytest.mark.parametrize("scheduler", ["fcfs", "prefix_aware", "fair", "shortest"])
def test_a_small_pool_does_preempt(tiny_models: dict[str, Path], scheduler: str) -> None:
    counting = counted(tiny_models["llama"], way="small pool", scheduler=scheduler)
    # The engine leaves a newcomer out that would take the room of those who run, so they are few.
    assert counting.num_preempted > 0


def test_a_higher_class_preempts(tiny_models: dict[str, Path]) -> None:
    pytest.importorskip("pegboard_schedulers")
    counting = Counting()
    settings = {"scheduler": {"name": "priority", "options": {"max_wait": None}}}
    case = Case(batch=5, arrivals=1, settings=settings)
    got = run("llama", tiny_models["llama"], case, observer=counting)
    assert differences(alone("llama", tiny_models["llama"]), got, tolerance=1e-5) == []
    assert counting.num_preempted > 2, "rows lack, and not KV"


@pytest.mark.parametrize("scheduler", [*SCHEDULERS, DISORDER])
def test_interruptions_preempt_under_every_scheduler(
    tiny_models: dict[str, Path], scheduler: str
) -> None:
    kv = "paged, dict"
    counting = counted(tiny_models["llama"], way="interrupted", batch=3, scheduler=scheduler, kv=kv)
    assert counting.num_preempted > 5


def test_a_chunk_is_of_one_sequence(tiny_models: dict[str, Path]) -> None:
    one, whole = (counted(tiny_models["llama"], batch=33, chunk=chunk) for chunk in (1, None))
    # The longest prompt of 40 tokens takes as many steps, whatever runs beside it.
    assert one.num_steps >= whole.num_steps + 39 - 10
    assert one.most_prefilled <= 33 < whole.most_prefilled


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_guesses_are_right_wrong_and_mixed(tiny_models: dict[str, Path], kind: str) -> None:
    def share(name: str) -> float:
        counting = counted(tiny_models["llama"], batch=7, guesses=f"{name} {kind}")
        assert counting.num_tried > 50
        return counting.num_accepted / counting.num_tried

    assert share("right") > 0.9
    assert 0.2 < share("mixed") < 0.9
    assert share("wrong") == 0.0


def test_siblings_begin_as_forks(tiny_models: dict[str, Path]) -> None:
    """Where blocks can be shared a prompt is computed once, and its last token for each sequence."""
    lengths = [(len(prompt), one.n) for prompt, one in zip(prompts(), params(), strict=True)]
    assert sum(n > 1 for _, n in lengths) > 5
    shared = counted(tiny_models["llama"], batch=33)
    assert shared.num_prefilled == sum(length + n - 1 for length, n in lengths)
    apart = counted(tiny_models["llama"], batch=33, kv="contiguous")
    assert apart.num_prefilled == sum(length * n for length, n in lengths)


@pytest.mark.parametrize("way", ["plenty", "small pool"])
@pytest.mark.parametrize("kv", [kv for kv in KV if ", " in kv])
def test_prefixes_are_found(tiny_models: dict[str, Path], kv: str, way: str) -> None:
    counting = counted(tiny_models["llama"], batch=2, kv=kv, way=way)
    # Five prompts, of eleven sequences, may read what came before them under their salt.
    assert counting.num_hit >= 5 * 12
    assert (counting.num_evicted > 20) == (way == "small pool")


def test_without_a_cache_nothing_is(tiny_models: dict[str, Path]) -> None:
    counting = counted(tiny_models["llama"], batch=2)
    assert counting.num_hit == counting.num_evicted == 0
