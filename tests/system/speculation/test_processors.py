"""Logits processors beside a drafter: one that reads the whole history sees each node's own, and one whose
state cannot be recomputed runs its requests without drafts, which is counted and said."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from pegboard import Engine, SamplingParams
from pegboard.builtin.metrics_observer import MetricsObserver
from pegboard.interfaces.logits_processor import LogitRow, LogitsProcessor, ProcessorContext
from pegboard.interfaces.observer import ObserverContext
from pegboard.interfaces.scheduler import QueueView, Scheduler, SchedulerContext, StepBuilder
from pegboard.testing.guessing_drafter import GuessingDrafter
from pegboard.testing.invariance import Case, Guesses, Traces, differences, run_case
from pegboard.testing.logits_processor import LogitsProcessorContract, MakeProcessor
from pegboard.testing.tiny import write_tiny_model

NUM_NODES = 4
VOCAB_SIZE = 517


class Digest(LogitsProcessor):
    """Prefers a token that a hash of the whole history names."""

    def __init__(self, context: ProcessorContext) -> None: ...
    def admit(self, row: int, params: Mapping[str, Any]) -> None: ...
    def release(self, row: int) -> None: ...

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> None:
        for one, row in zip(logits, rows, strict=True):
            assert row.position == len(row.history)
            digest = hashlib.blake2b(row.history.tobytes(), digest_size=2).digest()
            one[int.from_bytes(digest) % VOCAB_SIZE] += 2.0


class Mood(LogitsProcessor):
    """Prefers a token that all logits so far, and the number of calls, name. Nothing but those calls
    knows it."""

    manifest: ClassVar[Mapping[str, Any]] = {"promises": ["keeps_state"]}
    num_mistakes = 0

    def __init__(self, context: ProcessorContext) -> None:
        self._moods: dict[int, tuple[int, int]] = {}

    def admit(self, row: int, params: Mapping[str, Any]) -> None:
        self._moods[row] = (0, -1)

    def release(self, row: int) -> None:
        del self._moods[row]

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> None:
        (row,) = rows
        mood, position = self._moods[row.row]
        Mood.num_mistakes += position not in (-1, row.position - 1)
        mood = (31 * mood + int(logits[0].argmax()) + 7) % VOCAB_SIZE
        self._moods[row.row] = (mood, row.position)
        logits[0, mood] += 9.0


class TestMood(LogitsProcessorContract):
    params = ({"a": 1}, {"a": 2})
    keeps_state = True

    @pytest.fixture
    def make(self) -> MakeProcessor:
        return Mood

    def test_parameters_act(self, make: MakeProcessor) -> None:
        pytest.skip("it has none")


PROCESSORS = [Digest, Mood]
PROMPTS = [tuple(range(40 * at, 40 * at + size)) for at, size in enumerate((3, 9, 17) * 2, 1)]
USED: list[dict[str, Any]] = [
    {"Mood": {}},
    {"Digest": {}},
    {},
    {"Mood": {}, "Digest": {}},
    {"Digest": {}},
    {},
]
PARAMS = [
    SamplingParams(
        max_tokens=12,
        ignore_eos=True,
        logprobs=1,
        temperature=number % 2,
        seed=number,
        n=1 + number // 3,
        processors=used,
    )
    for number, used in enumerate(USED)
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"), dtype="float64", num_hidden_layers=1)
    return {
        "model": str(model),
        "dtype": "float64",
        "threads": 1,
        "prefix_cache": "none",
        "max_model_len": 40,
        "kv_cache": {"block_size": 4},
    }


@pytest.fixture(scope="module")
def plain(config: dict[str, Any]) -> Traces:
    """The outcome of each sequence alone, without a drafter."""
    return run_case(config, Case(batch=1), PROMPTS, PARAMS, logits_processor=PROCESSORS)


class Restless(Scheduler):
    """Every third step it takes the rows of all that it may take them of."""

    def __init__(self, context: SchedulerContext) -> None:
        self._num_steps = 0

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        self._num_steps += 1
        for seq in queue.running if self._num_steps % 3 == 0 else ():
            step.preempt(seq)
        for seq in (*queue.running, *queue.waiting):
            step.add(seq, seq.num_pending)


WAYS: dict[str, dict[str, Any]] = {
    "together": {"batch": 9},
    "in chunks": {"batch": 5, "chunk": 2},
    "interrupted": {"batch": 9, "interruptions": 3},
    "small pool": {"batch": 9, "pool": 88},
    "disorder": {"batch": 4, "disorder": 5, "budget": 24},
    "restless": {"batch": 9},
}


def ways() -> Iterator[Any]:
    """Each way with each width; half of the depths take their time."""
    for (number, way), width, depth in product(enumerate(WAYS), (0, 1, 2), (1, 2)):
        marks = (pytest.mark.slow,) if (number + width + depth) % 2 else ()
        yield pytest.param(way, width, depth, marks=marks)


@pytest.mark.parametrize(("way", "width", "depth"), ways())
def test_no_token_is_changed(
    config: dict[str, Any], plain: Traces, way: str, width: int, depth: int
) -> None:
    settings = dict(WAYS[way])
    if pool := settings.pop("pool", None):
        settings["pool"] = pool * bytes_a_slot(config)
    guesses = Guesses(right=0.7, width=width, num_nodes=NUM_NODES) if width else None
    case = Case(guesses=guesses, settings={"executor": {"depth": depth}}, **settings)
    Mood.num_mistakes = 0
    objects: dict[str, Any] = {"scheduler": Restless} if way == "restless" else {}
    got = run_case(
        config, case, PROMPTS, PARAMS, known=plain, logits_processor=PROCESSORS, **objects
    )
    assert differences(plain, got, 1e-9) == []
    assert not Mood.num_mistakes


@pytest.mark.parametrize("width", [0, 1])
def test_where_none_may_be_preempted_they_wait_for_all_their_kv(
    config: dict[str, Any], width: int
) -> None:
    """The pool holds little more than one of them."""
    prompts = PROMPTS[:4]
    params = [SamplingParams(max_tokens=30, ignore_eos=True, seed=5, processors={"Mood": {}})] * 4
    alone = run_case(config, Case(batch=1), prompts, params, logits_processor=PROCESSORS)
    guesses = Guesses(right=0.7, num_nodes=NUM_NODES) if width else None
    case = Case(batch=4, pool=56 * bytes_a_slot(config), guesses=guesses)
    got = run_case(config, case, prompts, params, known=alone, logits_processor=PROCESSORS)
    assert differences(alone, got, 1e-9) == []


def bytes_a_slot(config: Mapping[str, Any]) -> int:
    with Engine(config) as engine:
        (plan,) = engine.prepared.composition.models
        (group,) = plan.groups
        return 2 * group.num_kv_heads * group.head_dim * 8 * len(group.layers)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("width", [1, 2])
def test_requests_without_drafts_are_counted_and_said_once(
    config: dict[str, Any],
    plain: Traces,
    caplog: pytest.LogCaptureFixture,
    width: int,
    depth: int,
) -> None:
    caplog.set_level(logging.INFO)
    outputs = {(PROMPTS[key[0]], key[1]): trace.tokens for key, trace in plain.items()}
    observer = MetricsObserver(ObserverContext("tiny", num_speculative_tokens=NUM_NODES))
    drafting = {
        **config,
        "drafter": {"num_speculative_tokens": NUM_NODES, "policy": "fixed"},
        "executor": {"depth": depth},
    }
    objects: dict[str, Any] = {"logits_processor": PROCESSORS, "observer": observer}
    with Engine(drafting, drafter=GuessingDrafter(outputs, 0.9, width), **objects) as engine:
        words: list[Any] = [None, "off", None, None, None, {"num_speculative_tokens": 1}]
        ids = [
            engine.submit(prompt, params, speculative=word).request_id
            for prompt, params, word in zip(PROMPTS, PARAMS, words, strict=True)
        ]
        most = dict.fromkeys(ids, 0)
        while engine.has_work():
            for delta in engine.step():
                most[delta.request_id] = max(most[delta.request_id], len(delta.token_ids))
        assert not engine.core.cut_off
    at_once = [most[name] for name in ids]
    assert at_once[0] == at_once[1] == at_once[3] == 1
    assert at_once[2] > 1 and at_once[4] > 1 and at_once[5] == (2 if width == 1 else 1)
    name = "pegboard_spec_decode_requests_without_drafts_total"
    text = observer.render()
    for reason, count in (("processor", 2), ("request", 1)):
        assert f'{name}{{engine="0",model_name="tiny",reason="{reason}"}} {float(count)}' in text
    said = [line for line in caplog.messages if "run without drafts" in line]
    assert len(said) == 1 and "'Mood'" in said[0]


PLUGIN = """# /// pegboard
# [plugin]
# name = "mood"
# [[provides]]
# interface = "logits_processor"
# version = 1
# name = "mood"
# summary = "Keeps a state"
# promises = ["keeps_state"]
# ///
from pegboard import hookimpl


@hookimpl
def pegboard_logits_processors():
    return {"mood": lambda context: None}
"""


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_check_says_which_processors_do_without(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], drafter: str
) -> None:
    from pegboard.cli import main

    plugin = tmp_path / "mood.py"
    plugin.write_text(PLUGIN)
    sets = [f"plugins.load=[{plugin}]", "logits_processors=[mood]", f"drafter={drafter}"]
    words = [word for one in sets for word in ("--set", one)]
    assert main(["check", config["model"], *words]) == 0
    said = "requests that use logits processor 'mood' run without drafts"
    assert (said in capsys.readouterr().out) == (drafter == "ngram")
