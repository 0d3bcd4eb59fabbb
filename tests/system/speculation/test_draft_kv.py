"""No slot of KV is read before it is written, be it the target's or a drafter's own; and what a drafter's
model has written of known tokens is what a prefill of them writes.

Blocks are filled with NaN when they are handed out, and so are the slots of guesses after each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.interfaces.observer import Event, Observer, StepDone
from pegboard.request import SamplingParams
from pegboard.runner.draft_unit import DrafterModels, RunningDraftUnit
from pegboard.runner.model_unit import ModelUnit
from pegboard.runner.rows import Rows
from pegboard.runner.runner import Runner
from pegboard.step import Int32, Int64, StepBatch, StepResult
from pegboard.testing.dict_cache import DictCache
from pegboard.testing.invariance import Case, Traces, differences, run_case
from pegboard.testing.model_drafters import SecondModel
from pegboard.testing.odd_drafters import ODD
from pegboard.testing.tiny import write_tiny_model

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
PROMPTS = [tuple(2 + (7 * i + n * n) % 500 for i in range(n)) for n in (1, 9, 17, 12, 4)]
PROMPTS += [(*PROMPTS[2][:13], 3, 5), PROMPTS[1]]
PARAMS = [
    SamplingParams(
        max_tokens=9, temperature=float(i % 2), seed=i, n=1 + 2 * (i == 3), ignore_eos=True
    )
    for i in range(len(PROMPTS))
]
CASES = {
    "together": Case(batch=9),
    "preempted": Case(batch=3, interruptions=3, arrivals=1),
    "in chunks": Case(batch=2, chunk=3, budget=12),
    "in any order": Case(batch=3, disorder=5, budget=24),
    "behind known prefixes": Case(batch=2, arrivals=1, interruptions=2),
}
CACHED = "behind known prefixes"


@dataclass(slots=True)
class Text:
    """The KV of a row's known tokens, [num_tokens, size], by a drafter's own model. A cache or a fork
    served the first of them."""

    token_ids: tuple[int, ...]
    kv: torch.Tensor
    num_cached: int


@dataclass(slots=True)
class Poison:
    """Between the worker's steps and its KV.

    Attributes:
        texts: what each step left.
        nodes: what was proposed after each text for so many nodes asked for.
        num_blocks, num_slots: poisoned so far.
    """

    texts: list[Text] = field(default_factory=list)
    nodes: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = field(default_factory=list)
    num_blocks: int = 0
    num_slots: int = 0

    def hand_out(self, runner: Runner, batch: StepBatch) -> None:
        """Fills new blocks; those of a hit or a fork hold what they held."""
        on = runner._loaded
        assert on is not None
        served = {one.row: one.num_cached for one in batch.admitted}
        for update in batch.groups:
            unit, own = on.units.owner(update.group)
            size = unit.parts.groups[own].block_size
            ends = (update.entries + 1) * size
            known = np.array([served.get(row, 0) for row in update.rows.tolist()])
            new = update.blocks[(ends > known) & (update.blocks > 0)]
            self.num_blocks += len(new)
            for tensor in _tensors(unit, own):
                tensor[_index(new)] = _void(tensor)

    def void(
        self, unit: ModelUnit, rows: Rows, numbers: range, row: int, begin: int, end: int
    ) -> None:
        """Fills slots that hold nothing known."""
        if begin >= end:
            return
        self.num_slots += end - begin
        for own, group in enumerate(numbers):
            slots = rows.slots(group, np.full(end - begin, row, np.int32), np.arange(begin, end))
            for tensor in _tensors(unit, own):
                flat = tensor.view(-1, *tensor.shape[2:])
                flat[_index(slots)] = _void(tensor)

    def note(self, unit: ModelUnit, rows: Rows, numbers: range, row: int, observed: int) -> None:
        """Notes what the drafter's model holds of a row's known tokens."""
        parts = []
        for own, group in enumerate(numbers):
            slots = rows.slots(group, np.full(observed, row, np.int32), np.arange(observed))
            for tensor in _tensors(unit, own):
                flat = tensor.view(-1, *tensor.shape[2:])
                parts.append(flat[_index(slots)].flatten(1).double())
        known = tuple(rows.token_ids[row, :observed].tolist())
        self.texts.append(Text(known, torch.cat(parts, dim=1), int(rows.num_cached[row])))


def _tensors(unit: ModelUnit, group: int) -> Iterator[torch.Tensor]:
    """[num_blocks, block_size, ...], of the torch backend."""
    for layer in unit.parts.groups[group].layers:
        yield from unit.kv[layer].values()


def _void(tensor: torch.Tensor) -> float:
    return torch.nan if tensor.is_floating_point() else 127


def _index(values: Int32 | Int64) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    """In force for all engines that the test makes."""
    found = Poison()
    execute, observing = Runner.execute, DrafterModels.observing

    def poisoned(runner: Runner, batch: StepBatch) -> StepResult:
        found.hand_out(runner, batch)
        result = execute(runner, batch)
        on = runner._loaded
        assert on is not None
        target = on.units.target
        known = batch.num_computed + batch.num_tokens
        for i, row in enumerate(batch.rows.tolist()):
            kept = int(known[i] + result.num_accepted[i])
            end = int(known[i] + batch.verify[i])
            found.void(target, on.rows, on.units.numbers(target), row, kept, end)
        return result

    @contextmanager
    def watched(
        models: DrafterModels, rows: Int32, num_observed: Int64, propose: Int32
    ) -> Iterator[None]:
        with observing(models, rows, num_observed, propose):
            yield
            own = models.unit
            ends = None if own is None else own.num_slots[rows].tolist()
        if own is None or ends is None:
            return
        assert isinstance(own, RunningDraftUnit) and own._unit is not None
        for row, asked in zip(rows.tolist(), propose.tolist(), strict=True):
            table = own._rows
            text = tuple(table.token_ids[row, : table.num_known[row]].tolist())
            nodes = tuple(table.drafts.token_ids[row, : table.drafts.counts[row]].tolist())
            found.nodes.append((text, asked, nodes))
        for row, observed, end in zip(rows.tolist(), num_observed.tolist(), ends, strict=True):
            found.note(own._unit, own._rows, own._groups, row, observed)
            found.void(own._unit, own._rows, own._groups, row, observed, end)

    monkeypatch.setattr(Runner, "execute", poisoned)
    monkeypatch.setattr(DrafterModels, "observing", watched)
    return found


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    window: dict[str, Any] = {"family": "mistral", "sliding_window": 8}
    return {
        "llama": write_tiny_model(folder / "llama", dtype="float64", tokenizer=True),
        "a window": write_tiny_model(folder / "window", dtype="float64", **window),
        "second": write_tiny_model(folder / "second", dtype="float64", seed=3, num_hidden_layers=1),
    }


@pytest.fixture(scope="module")
def drafters(targets: dict[str, Path], model_drafters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of `drafter`."""
    return {"second model": {"model": str(targets["second"])}, **model_drafters}


def config(target: Path, encoding: str = "none") -> dict[str, Any]:
    return {
        "model": str(target),
        "max_model_len": MAX_MODEL_LEN,
        "dtype": "float64",
        "attention": "torch",
        "kv_cache": {"block_size": BLOCK_SIZE, "encoding": encoding},
        "prefix_cache": "none",
        "threads": 1,
    }


class Counts(Observer):
    """Counts drafts and hits."""

    def __init__(self) -> None:
        self.num_tried = self.num_accepted = self.num_hits = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.num_tried += event.num_tried
            self.num_accepted += event.num_accepted
            self.num_hits += event.num_prefix_hits

    def close(self) -> None: ...


def skip_without_plugin(drafter: str) -> None:
    if "eagle" in drafter or drafter == "draft model":
        pytest.importorskip("pegboard_eagle" if "eagle" in drafter else "pegboard_draft_model")


def objects_of(drafter: str) -> dict[str, Any]:
    return {"drafter": SecondModel} if drafter == "second model" else {}


_plain: dict[tuple[str, str], Traces] = {}


def plain(targets: dict[str, Path], target: str, encoding: str) -> Traces:
    """Without drafters."""
    if (target, encoding) not in _plain:
        base = config(targets[target], encoding)
        _plain[target, encoding] = run_case(base, Case(batch=9), PROMPTS, PARAMS)
    return _plain[target, encoding]


def prefilled(base: dict[str, Any], drafter: str, text: tuple[int, ...]) -> torch.Tensor:
    """What the drafter's model holds of a text that it was given as a prompt."""
    with pytest.MonkeyPatch.context() as patch:
        found = poison.__wrapped__(patch)  # type: ignore[attr-defined]
        params = [SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)]
        run_case(base, Case(batch=1), [text], params, **objects_of(drafter))
    (seen,) = [one for one in found.texts if one.token_ids == text]
    kv: torch.Tensor = seen.kv
    return kv


@pytest.mark.parametrize("drafter", ["second model", "draft model", "eagle chain", "eagle tree"])
@pytest.mark.parametrize(
    ("way", "depth"),
    [
        pytest.param(way, depth, marks=[pytest.mark.slow] if (number + depth) % 2 else [])
        for number, way in enumerate(CASES)
        for depth in (1, 2)
    ],
)
def test_the_drafters_kv_of_known_tokens_is_that_of_a_prefill(
    poison: Poison,
    targets: dict[str, Path],
    drafters: dict[str, dict[str, Any]],
    drafter: str,
    way: str,
    depth: int,
) -> None:
    """After each step, however its rows came to be."""
    skip_without_plugin(drafter)
    expected = plain(targets, "llama", "none")
    drafting = {**drafters[drafter], "num_speculative_tokens": 4, "policy": "fixed"}
    base = {**config(targets["llama"]), "drafter": drafting, "executor": {"depth": depth}}
    objects, counts = objects_of(drafter), Counts()
    if way == CACHED:
        base["prefix_cache"] = "auto"
        objects["prefix_cache"] = DictCache
    got = run_case(base, CASES[way], PROMPTS, PARAMS, observer=counts, **objects)
    assert differences(expected, got, tolerance=1e-5) == []
    assert counts.num_tried > 10 and (counts.num_hits > 0) == (way == CACHED)
    assert poison.num_blocks > 20 and poison.num_slots > 50
    texts = list(poison.texts)
    begins = {one.token_ids[:end] for one in texts for end in range(len(one.token_ids))}
    longest = {one.token_ids for one in texts} - begins
    base["prefix_cache"] = "none"
    known = {text: prefilled(base, drafter, text) for text in longest}
    skipped = 1 if "eagle" in drafter else 0
    for one in texts:
        length = len(one.token_ids)
        whole = next(kv for text, kv in known.items() if text[:length] == one.token_ids)
        found, wanted = one.kv[skipped:], whole[skipped:length]
        if drafter == "draft model" or "eagle" in drafter:
            # Of a row for which no guess was asked some tokens wait to be read: none that others have.
            read = ~found.isnan().any(dim=1)
            num_others = max(0, one.num_cached - skipped)
            assert read[:num_others].all() and (~read).sum() < BLOCK_SIZE
            found, wanted = found[read], wanted[read]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("drafter", ["oracle", "adversarial", "random"])
@pytest.mark.parametrize(
    ("target", "encoding", "way", "depth"),
    [
        ("llama", "int8", "together", 1),
        ("a window", "none", "in any order", 1),
        ("a window", "int8", "preempted", 2),
        ("llama", "none", CACHED, 2),
        ("a window", "none", CACHED, 1),
    ],
)
def test_trees_read_nothing_of_the_targets_that_is_not_written(
    poison: Poison,
    targets: dict[str, Path],
    drafter: str,
    target: str,
    encoding: str,
    way: str,
    depth: int,
) -> None:
    expected = plain(targets, target, encoding)
    outputs = {(PROMPTS[number], index): one.tokens for (number, index), one in expected.items()}
    base = {
        **config(targets[target], encoding),
        "drafter": {"num_speculative_tokens": 6, "policy": "fixed"},
        "executor": {"depth": depth},
    }
    objects: dict[str, Any] = {"drafter": ODD[drafter](outputs, 1)}
    counts = Counts()
    if way == CACHED:
        base["prefix_cache"] = "auto"
        objects["prefix_cache"] = DictCache
    got = run_case(base, CASES[way], PROMPTS, PARAMS, observer=counts, **objects)
    assert differences(expected, got, tolerance=1e-5) == []
    assert counts.num_tried > 10 and counts.num_accepted > 0
    assert poison.num_blocks > 20 and poison.num_slots > 20


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafter", ["itself", "draft model", "eagle chain", "eagle tree"])
def test_behind_a_warm_cache_the_same_is_guessed_and_accepted(
    poison: Poison,
    targets: dict[str, Path],
    drafters: dict[str, dict[str, Any]],
    drafter: str,
    depth: int,
) -> None:
    """The prompts again, one after the other. `itself`: the target drafts for itself."""
    skip_without_plugin(drafter)
    own = {"model": str(targets["llama"])} if drafter == "itself" else drafters[drafter]
    base = {
        **config(targets["llama"]),
        "drafter": {**own, "num_speculative_tokens": 4, "policy": "fixed"},
        "executor": {"depth": depth},
        "prefix_cache": "auto",
    }
    objects: dict[str, Any] = {"drafter": SecondModel} if drafter == "itself" else {}
    cold, warm = Counts(), Counts()
    # Those of one request fork; that is another way to be warm.
    prompts, params = PROMPTS[1:3], [PARAMS[0]] * 2
    caches: dict[str, Any] = {"prefix_cache": DictCache}
    run_case(base, Case(batch=1, arrivals=1), prompts, params, observer=cold, **caches, **objects)
    guessed = list(poison.nodes)
    poison.nodes.clear()
    twice = [*prompts, *prompts]
    run_case(base, Case(batch=1, arrivals=1), twice, params * 2, observer=warm, **caches, **objects)
    assert cold.num_hits == 0 and warm.num_hits > 16
    texts = {text: (asked, nodes) for text, asked, nodes in guessed if asked}
    again = [(text, (asked, nodes)) for text, asked, nodes in poison.nodes if asked]
    assert again and all(texts[text] == found for text, found in again)
    assert (warm.num_tried, warm.num_accepted) == (2 * cold.num_tried, 2 * cold.num_accepted)
    assert drafter != "itself" or cold.num_accepted > 10
