"""No drafter changes a token, whatever it guesses: with each feature of a request, each way to run, and
each way to verify.

In float64 on tiny models, where rounding cannot hide or excuse a fault of the logic. Each case runs
requests that have one feature each, and compares all that they answer with the same requests without a
drafter.
"""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from pegboard.engine import breaker
from pegboard.interfaces.logits_processor import LogitRow, LogitsProcessor
from pegboard.interfaces.observer import Event, Observer, StepDone
from pegboard.interfaces.speculation_policy import (
    Choice,
    DraftView,
    SpeculationPolicy,
    StepCosts,
)
from pegboard.request import Request, SamplingParams
from pegboard.testing.dict_cache import DictCache
from pegboard.testing.erring_drafter import ErringDrafter
from pegboard.testing.invariance import Case, Traces, differences, pairwise, run_case
from pegboard.testing.model_drafters import Branching, write_one_layer
from pegboard.testing.odd_drafters import ODD
from pegboard.testing.tiny import write_tiny_model

MAX_MODEL_LEN = 48
BLOCK_SIZE = 4
SLOTS_OF_ONE = MAX_MODEL_LEN + 32
"""Slots of one longest sequence, its drafts, and little more."""

WINDOWED: dict[str, Any] = {"family": "mistral", "sliding_window": 8}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "a window": WINDOWED,
    "a window in half of the layers": WINDOWED
    | {"layer_types": ["sliding_attention", "full_attention"]},
}
FEATURES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.4, "seed": 2**64 - 1},
    {"temperature": 1.0, "seed": 1, "top_k": 5},
    {"temperature": 1.0, "seed": 2, "top_p": 0.7},
    {"temperature": 1.2, "seed": 3, "min_p": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 0.7, "seed": 4, "presence_penalty": 1.5},
    {"temperature": 0.0, "frequency_penalty": 2.0},
    {"temperature": 0.0, "logit_bias": {7: 3.0, 40: 4.0, 9: -100.0, 300: 3.5}},
    {"temperature": 1.0, "seed": 5, "n": 3},
    {"temperature": 1.0, "seed": 6, "stop": ("e", "%:", "the ", "s")},
    {"temperature": 1.0, "seed": 7, "stop": tuple("oeiatn"), "min_tokens": 3},
    {"temperature": 1.0, "seed": 8, "stop_token_ids": tuple(range(2, 517, 7))},
    {"temperature": 0.0, "logit_bias": {1: 20.0}, "min_tokens": 4, "ignore_eos": False},
    {"temperature": 0.0, "logit_bias": {1: 20.0}},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.9, "seed": 9, "n": 2, "prompt_logprobs": 3, "logprobs": 0},
    {"temperature": 0.0, "max_tokens": 1},
    {"temperature": 0.0, "max_tokens": None},
    {"temperature": 0.8, "seed": 10, "max_tokens": 2, "processors": {"last_two": {}}},
]
"""What each request asks for beside `COMMON`, one after the other."""
COMMON: dict[str, Any] = {"max_tokens": 11, "ignore_eos": True}

DRAFTERS = (
    *ODD,
    "crashing",
    "ngram",
    "suffix",
    "draft model",
    "one layer",
    "eagle chain",
    "eagle tree",
)
PREEMPTION: dict[str, dict[str, Any]] = {
    "none": {},
    "interrupted": {"interruptions": 1},
    "small pool": {"pool": SLOTS_OF_ONE},
    "disorder": {"disorder": 2, "budget": 24},
}
AXES: dict[str, tuple[Any, ...]] = {
    "drafter": DRAFTERS,
    "k": (0, 1, 2, 3, 4, 5, 6),
    "batch": (1, 3, 17),
    "chunk": (None, 1, 7),
    "preemption": tuple(PREEMPTION),
    "cache": ("none", "dict", "trie"),
    "turn": (0, 1),
    "processors": ("none", "recomputable", "stateful"),
    "policy": ("fixed", "adaptive", "any"),
    "depth": (1, 2),
    "target": tuple(TARGETS),
    "encoding": ("none", "int8"),
}
"""`turn`: which half of the features a small batch runs, and on which prompts."""
EVERY_PAIR = list(pairwise(AXES))
SLOW_PAIRS = [row for seed in (1, 2) for row in pairwise(AXES, seed)]
NUM_RANDOM = 60
"""Further rows by chance, others in each run."""
LOOKUPS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 1, "min_confidence": 0},
    "suffix": {"min_match": 1, "min_confidence": 0, "recent_tokens": 300},
}
"""Options under which they guess at almost each turn."""


class LastTwo(LogitsProcessor):
    """Likes or dislikes some tokens after each pair of tokens, and never wants a pair twice."""

    manifest: ClassVar = {"name": "last_two"}

    def admit(self, row: int, params: Mapping[str, Any]) -> None: ...

    def release(self, row: int) -> None: ...

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> None:
        for i, row in enumerate(rows):
            assert len(row.history) == row.position
            text = row.history.tolist()
            dice = random.Random(repr(text[-2:]))
            for _ in range(20):
                logits[i, dice.randrange(logits.shape[1])] += dice.uniform(-4, 4)
            for before, after in itertools.pairwise(text):
                if before == text[-1]:
                    logits[i, after] = -torch.inf


class Counting(LogitsProcessor):
    """Its state is how often it was called for a row: it must be once for each token, in order."""

    manifest: ClassVar = {"name": "counting", "promises": ["keeps_state"]}

    def __init__(self) -> None:
        self._called: dict[int, int] = {}

    def admit(self, row: int, params: Mapping[str, Any]) -> None:
        self._called[row] = 0

    def release(self, row: int) -> None:
        del self._called[row]

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> None:
        for i, row in enumerate(rows):
            called = self._called[row.row]
            assert row.position == row.num_prompt_tokens + called
            logits[i, (7 * called) % 500] += 6
            self._called[row.row] += 1


class AnyChoice(SpeculationPolicy):
    """Verifies and asks for as many nodes as chance wants."""

    manifest: ClassVar = {"name": "any"}

    def __init__(self, most: int) -> None:
        self._most = most
        self._dice = random.Random(most)

    def choose(
        self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts
    ) -> Sequence[Choice]:
        dice = self._dice
        return [
            Choice(dice.randint(0, row.num_drafts), dice.randint(0, self._most)) for row in rows
        ]


def prompts() -> list[tuple[int, ...]]:
    """Of many lengths; some begin alike, and some repeat themselves."""
    dice = random.Random(3)
    known = [dice.randrange(2, 517) for _ in range(9)]
    phrase = [dice.randrange(2, 300) for _ in range(3)]
    rest = [[dice.randrange(2, 517) for _ in range(length)] for length in (2, 7, 14, 1, 4, 8)]
    listed = [*rest[3:], *(known + more for more in rest[:3]), *(phrase * n for n in (3, 6, 8))]
    return [tuple(one) for one in [*listed, [*known, *phrase, *phrase]]]


def requests(turn: int, processors: str) -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
    """One for each feature, each with another prompt."""
    own: dict[str, Any] = {}
    if processors == "recomputable":
        own["processors"] = {"last_two": {}}
    asked = [SamplingParams(**{**COMMON, **own, **feature}) for feature in FEATURES]
    if processors == "stateful":
        # Some, so that those with drafts run beside them.
        stateful: dict[str, Any] = {"processors": {"last_two": {}, "counting": {}}}
        asked[1::3] = [msgspec.structs.replace(one, **stateful) for one in asked[1::3]]
    texts = prompts()
    return [(*texts[(3 * i + 5 * turn) % len(texts)], 400 + i) for i in range(len(asked))], asked


def fields(turn: int) -> list[dict[str, Any]]:
    """Further fields of the requests."""
    modes = ("on", "read_only", "on", "on", "off")
    hints = (None, None, "off", None, None, {"num_speculative_tokens": 1}, None)
    return [
        {
            "priority": i % 3 - 1,
            "tenant": "abc"[i * 7 % 3],
            "cache_salt": "apart" if i % 6 == 5 else "",
            "prefix_cache": modes[i % len(modes)],
            "speculative": hints[(i + 3 * turn) % len(hints)],
        }
        for i in range(len(FEATURES))
    ]


Targets = Mapping[str, Path]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    written = {
        name: write_tiny_model(folder / name, dtype="float64", tokenizer=True, **shape)
        for name, shape in TARGETS.items()
    }
    written["one layer"] = write_one_layer(folder / "one layer", written["llama"])
    return written


Heads = Mapping[str, Mapping[str, Any]]


def config(targets: Targets, row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": str(targets[row["target"]]),
        "max_model_len": MAX_MODEL_LEN,
        "dtype": "float64",
        "attention": "torch",
        "kv_cache": {"block_size": BLOCK_SIZE, "encoding": row["encoding"]},
        "prefix_cache": "none",
        "threads": 1,
    }


def processors_of(row: Mapping[str, Any]) -> list[LogitsProcessor]:
    return [LastTwo(), *([Counting()] if row["processors"] == "stateful" else [])]


_plain: dict[tuple[Any, ...], Traces] = {}


def plain(targets: Targets, row: Mapping[str, Any]) -> Traces:
    """The outcome of all requests without a drafter."""
    key = tuple(row[axis] for axis in ("target", "encoding", "turn", "processors"))
    if key not in _plain:
        asked = requests(row["turn"], row["processors"])
        base, processors = config(targets, row), processors_of(row)
        _plain[key] = run_case(base, Case(batch=33), *asked, logits_processor=processors)
    return _plain[key]


def _num_bytes(row: Mapping[str, Any]) -> int:
    """KV of one longest sequence."""
    size = 24 * 8 if row["encoding"] == "none" else 24 + 8
    layers = 2 + (row["drafter"] in ("draft model", "one layer", "eagle chain", "eagle tree"))
    return 2 * layers * size * SLOTS_OF_ONE


def case_of(row: Mapping[str, Any]) -> Case:
    ways = dict(PREEMPTION[row["preemption"]])
    if "pool" in ways:
        ways["pool"] = _num_bytes(row)
    settings: dict[str, Any] = {"executor": {"depth": row["depth"]}}
    settings["drafter"] = {"num_speculative_tokens": max(1, row["k"])}
    if row["k"] and row["policy"] != "any":
        settings["drafter"]["policy"] = row["policy"]
    if row["cache"] == "dict":
        settings["prefix_cache"] = "auto"  # an object is given for it
    elif row["cache"] == "trie":
        pytest.importorskip("pegboard_prefix_cache")
        settings["prefix_cache"] = "trie"
    return Case(row["batch"], row["chunk"], settings=settings, **ways)


def objects_of(targets: Targets, row: Mapping[str, Any], known: Traces) -> dict[str, Any]:
    """Engine parts of the row that are no config's."""
    objects: dict[str, Any] = {"logits_processor": processors_of(row)}
    if row["cache"] == "dict":
        objects["prefix_cache"] = DictCache
    if row["policy"] == "any" or not row["k"]:
        objects["speculation_policy"] = AnyChoice(row["k"])
    name = row["drafter"]
    texts, _ = requests(row["turn"], row["processors"])
    outputs = {(texts[number], index): one.tokens for (number, index), one in known.items()}
    if name in ODD:
        objects["drafter"] = ODD[name](outputs, row["k"])
    elif name == "crashing":
        objects["drafter"] = ErringDrafter(outputs, 0.7, 1 + row["k"] % 3, row["k"])
    elif name == "one layer":
        objects["drafter"] = Branching
    return objects


def check(targets: Targets, heads: Heads, row: Mapping[str, Any], **objects: Any) -> None:
    """The requests of the row answer as without a drafter; a small batch runs half of them."""
    known, case = plain(targets, row), case_of(row)
    name, drafting = row["drafter"], case.settings["drafter"]
    if name in LOOKUPS:
        pytest.importorskip("pegboard_ngram")
        drafting |= {"name": name, "options": LOOKUPS[name]}
    elif name == "one layer":
        drafting["model"] = str(targets[name])
    elif name in heads:
        pytest.importorskip(f"pegboard_{heads[name]['name']}")
        drafting |= heads[name]
    chosen = range(len(FEATURES))[slice(None) if row["batch"] > 3 else slice(row["turn"], None, 2)]
    texts, asked = requests(row["turn"], row["processors"])
    got = run_case(
        config(targets, row),
        case,
        [texts[i] for i in chosen],
        [asked[i] for i in chosen],
        fields=[fields(row["turn"])[i] for i in chosen],
        may_be_cut_off=["drafter"] if name == "crashing" else [],
        **objects_of(targets, row, known),
        **objects,
    )
    expected = {
        (number, index): known[i, index]
        for number, i in enumerate(chosen)
        for index in range(asked[i].n)
    }
    assert differences(expected, got, tolerance=1e-5) == [], str(row)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was cut off is tried again at once."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(breaker, "MAX_PAUSE_S", 0.0)


@pytest.mark.parametrize(
    "row",
    [
        row if number % 4 else pytest.param(row, marks=pytest.mark.slow)
        for number, row in enumerate(EVERY_PAIR)
    ],
    ids=str,
)
def test_pairs_of_ways_to_speculate(
    targets: Targets, model_drafters: Heads, row: dict[str, Any]
) -> None:
    check(targets, model_drafters, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW_PAIRS, ids=str)
def test_more_pairs(targets: Targets, model_drafters: Heads, row: dict[str, Any]) -> None:
    check(targets, model_drafters, row)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_RANDOM))
def test_any_way_to_speculate(targets: Targets, model_drafters: Heads, number: int) -> None:
    """What fails is run again by its row, which the failure shows."""
    seed = secrets.randbits(32)
    dice = random.Random(seed)
    row = {axis: dice.choice(values) for axis, values in AXES.items()}
    print(f"seed {seed}: {row}")
    check(targets, model_drafters, row)


def test_every_field_of_a_request_is_among_the_features() -> None:
    """A new one has to be added to them."""
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert names == {name for feature in (COMMON, *FEATURES) for name in feature}
    theirs = {field.name for field in msgspec.structs.fields(Request)}
    given = {"request_id", "prompt_token_ids", "params", "arrival"}
    assert theirs == given | {name for one in fields(0) for name in one}


def test_each_feature_matters(targets: Targets) -> None:
    """Without it, the request is answered otherwise."""
    row = {axis: values[0] for axis, values in AXES.items()}
    texts, _ = requests(row["turn"], row["processors"])
    kept = ("temperature", "seed")
    without = [
        SamplingParams(**COMMON, **{name: feature[name] for name in kept if name in feature})
        for feature in FEATURES
    ]
    got = run_case(config(targets, row), Case(batch=33), texts, without)
    expected = plain(targets, row)
    for number, feature in enumerate(FEATURES):
        same = {key: one for key, one in got.items() if key[0] == number}
        given = {key: one for key, one in expected.items() if key[0] == number}
        matters = any(name not in kept for name in feature)
        assert (differences(given, same, tolerance=1e-5) != []) == matters, str(feature)


class Drafts(Observer):
    """Counts drafts."""

    def __init__(self) -> None:
        self.num_tried = self.num_accepted = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.num_tried += event.num_tried
            self.num_accepted += event.num_accepted

    def close(self) -> None: ...


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_each_drafter_is_verified(targets: Targets, model_drafters: Heads, drafter: str) -> None:
    """What it guesses is compared with the target's tokens, and is right or wrong as its name says."""
    row = {axis: values[0] for axis, values in AXES.items()}
    drafts = Drafts()
    check(targets, model_drafters, row | {"drafter": drafter, "k": 4, "batch": 17}, observer=drafts)
    assert drafts.num_tried > (2 if drafter == "crashing" else 10)
    share = drafts.num_accepted / drafts.num_tried
    if drafter in ("right", "oracle"):
        assert share > 0.9
    elif drafter == "wrong":
        assert share == 0
    elif drafter in ODD:
        assert 0 < share < 0.9
