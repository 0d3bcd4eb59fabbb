"""A step in flight on a real worker: what ends, fails or is checked meanwhile changes no token."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from pegboard import Config, Engine, SamplingParams
from pegboard.compose import prepare
from pegboard.interfaces.drafter import Drafter, Observation
from pegboard.interfaces.logits_processor import LogitsProcessor
from pegboard.interfaces.speculation_policy import Choice, DraftView, SpeculationPolicy, StepCosts
from pegboard.request import SequenceDelta
from pegboard.step import Drafts, Float32, Int32, RowAdmission
from pegboard.testing.erring_drafter import nodes_of
from pegboard.testing.guessing_drafter import GuessingDrafter
from pegboard.testing.invariance import Case, differences, run_case

PROMPTS = [tuple(2 + (7 * i + n) % 500 for i in range(n)) for n in (9, 9, 21, 4)]
DEPTHS = (1, 2)


class FailsAt(LogitsProcessor):
    """Raises for rows whose history is so long; it reads all of the history."""

    manifest: ClassVar = {"name": "fails_at"}

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}

    def admit(self, row: int, params: Any) -> None:
        self.lengths[row] = params["length"]

    def apply(self, logits: torch.Tensor, rows: Any) -> None:
        for i, view in enumerate(rows):
            assert len(view.history) == view.position
            if view.position >= self.lengths[view.row]:
                raise ValueError("far enough")
            logits[i, int(view.history.sum()) % 500] += 3.0

    def release(self, row: int) -> None:
        del self.lengths[row]


def _outputs(
    small_config: dict[str, Any], depth: int, **objects: Any
) -> dict[str, list[SequenceDelta]]:
    """The deltas of four requests, of which the first two fail on the way."""
    deltas: dict[str, list[SequenceDelta]] = {}
    with Engine({**small_config, "executor": {"depth": depth}}, **objects) as engine:
        names = {}
        for number, prompt in enumerate(PROMPTS):
            length = (13, 14, 99, 99)[number]
            params = SamplingParams(
                temperature=1.0,
                seed=number,
                max_tokens=20,
                ignore_eos=True,
                processors={"fails_at": {"length": length}},
            )
            names[engine.submit(prompt, params).request_id] = str(number)
        while engine.has_work():
            for delta in engine.step():
                deltas.setdefault(names[delta.request_id], []).append(delta)
    return deltas


def test_a_row_that_fails_in_flight_ends_alone(small_config: dict[str, Any]) -> None:
    at_one, at_two = (_outputs(small_config, depth, logits_processor=FailsAt()) for depth in DEPTHS)
    for name, ahead in at_two.items():
        tokens, expected = (
            [token for delta in deltas for token in delta.token_ids]
            for deltas in (ahead, at_one[name])
        )
        assert tokens == expected and len(tokens) == {"0": 4, "1": 5}.get(name, 20)
        assert ahead[-1].finish_reason == ("error" if name in "01" else "length")
        assert ahead[-1].error == at_one[name][-1].error


class Following(Drafter):
    """Drafts nothing, and notes each row whose tokens are not those that it was told before."""

    manifest: ClassVar = {"name": "following"}

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.num_shown = 0
        self.wrong: list[str] = []

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self.rows[admission.row] = admission.token_ids.tolist()

    def release(self, row: int, num_tokens: int) -> None:
        if len(self.rows.pop(row)) < num_tokens:
            self.wrong.append(f"row {row} is released with tokens that it never had")

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        for i, row in enumerate(seen.rows.tolist()):
            own = slice(seen.offsets[i], seen.offsets[i + 1])
            positions, told = seen.positions[own].tolist(), self.rows[row]
            if told[positions[0] : positions[-1] + 1] != seen.token_ids[own].tolist():
                self.wrong.append(f"row {row} at {positions}")
            told += seen.next_token_ids[seen.next_offsets[i] : seen.next_offsets[i + 1]].tolist()
            self.num_shown += 1
        return nodes_of([], [])


class AsksForNone(SpeculationPolicy):
    """Asks for no drafts, so that rows need not wait for them."""

    manifest: ClassVar = {"name": "asks_for_none"}

    def choose(
        self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts
    ) -> Sequence[Choice]:
        return [Choice(0, 0) for _ in rows]


def test_a_drafter_is_shown_no_token_of_a_row_that_failed(small_config: dict[str, Any]) -> None:
    drafter = Following()
    deltas = _outputs(
        {**small_config, "drafter": {"name": "following", "num_speculative_tokens": 3}},
        depth=2,
        logits_processor=FailsAt(),
        drafter=drafter,
        speculation_policy=AsksForNone(),
    )
    assert [deltas[name][-1].finish_reason for name in "0123"] == ["error"] * 2 + ["length"] * 2
    assert drafter.num_shown > 40 and drafter.wrong == [] and drafter.rows.keys() <= {2, 3}


def test_cached_blocks_are_compared_behind_the_step_in_flight(small_config: dict[str, Any]) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)] * len(PROMPTS)
    expected = run_case(small_config, Case(1), PROMPTS, params)
    settings = {"executor": {"depth": 2}, "kv_cache": {"block_size": 4, "verify": True}}
    case = Case(3, arrivals=1, cached=True, settings=settings)
    got = run_case(small_config, case, PROMPTS, params)
    assert differences(expected, got, tolerance=1e-5) == []


def test_the_workers_thread_ends_with_the_engine(small_config: dict[str, Any]) -> None:
    engine = Engine({**small_config, "executor": {"depth": 2}})
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "worker_0")
    engine.submit(PROMPTS[0], SamplingParams(max_tokens=9))
    engine.step()
    engine.close()
    assert not thread.is_alive()
    assert [delta.finish_reason for delta in engine.step()] == ["abort"]


@pytest.mark.parametrize(
    ("drafts", "wanted", "depth", "why"),
    [
        (False, "auto", 1, "executor 'local' states it"),
        (True, "auto", 1, "drafter"),
        (False, 2, 2, ""),
        (True, 2, 2, ""),
    ],
)
def test_the_depth_is_the_configs_or_the_executors(
    small_config: dict[str, Any], drafts: bool, wanted: Any, depth: int, why: str
) -> None:
    objects: dict[str, Any] = {"drafter": GuessingDrafter({}, 1.0, 1)} if drafts else {}
    settings = {"executor": {"depth": wanted}}
    if drafts:
        settings["drafter"] = {"name": "GuessingDrafter", "num_speculative_tokens": 3}
    prepared = prepare(Config.from_values({**small_config, **settings}), **objects)
    assert prepared.composition.depth == depth
    said = {decision.key: decision.why for decision in prepared.composition.decisions}
    assert why in said.get("executor.depth", "")
    assert ("executor.depth" in said) is (wanted == "auto")
