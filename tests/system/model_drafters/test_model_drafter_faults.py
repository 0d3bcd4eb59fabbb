"""Drafters with a model of their own that err are cut off, and requests go on with the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from pegboard.builtin.torch_attention import TorchAttention
from pegboard.errors import EngineError
from pegboard.interfaces.drafter import Observation, UnitTokens
from pegboard.runner import guarded_drafter
from pegboard.testing.invariance import Case, Traces, differences
from pegboard.testing.model_drafters import Branching, OneLayer, SecondModel

RunDrafter = Callable[..., tuple[Traces, Any]]

Fault = Callable[[Any, Observation], Any]


def _raise(error: BaseException) -> Any:
    raise error


def _past_its_slots(drafter: SecondModel, seen: Observation) -> Any:
    """Writes to blocks that are another row's."""
    row, length = seen.rows[:1], len(drafter.rows[int(seen.rows[0])])
    ids = torch.zeros(int(seen.propose[0]) + 2, dtype=torch.int64)
    tokens = UnitTokens(row, np.array([0, len(ids)], np.int32), np.array([length], np.int32), ids)
    return drafter.unit.forward(tokens)


def _in_a_row_of_no_step(drafter: SecondModel, seen: Observation, number: int) -> Any:
    row = np.array([number], np.int32)
    offsets, ids = np.array([0, 1], np.int32), torch.zeros(1, dtype=torch.int64)
    return drafter.unit.forward(UnitTokens(row, offsets, np.array([0], np.int32), ids))


def _parents_that_do_not_precede(drafter: SecondModel, seen: Observation) -> Any:
    offsets, ids = np.array([0, 1], np.int32), torch.zeros(1, dtype=torch.int64)
    start, parents = seen.positions[:1], np.array([0], np.int32)
    return drafter.unit.forward(UnitTokens(seen.rows[:1], offsets, start, ids, parents))


def _tokens_that_its_model_has_not(drafter: SecondModel, seen: Observation) -> Any:
    ids = torch.full((1,), 10**6, dtype=torch.int64)
    offsets = np.array([0, 1], np.int32)
    return drafter.unit.forward(UnitTokens(seen.rows[:1], offsets, seen.positions[:1], ids))


FAULTS: dict[str, Fault] = {
    "raises": lambda drafter, seen: _raise(ValueError("no")),
    "is out of memory": lambda drafter, seen: _raise(torch.OutOfMemoryError("no")),
    "answers something else": lambda drafter, seen: None,
    "writes past its slots": _past_its_slots,
    "writes to a row of no step": lambda drafter, seen: _in_a_row_of_no_step(drafter, seen, 99),
    "counts rows from the end": lambda drafter, seen: _in_a_row_of_no_step(drafter, seen, -1),
    "gives parents that do not precede": _parents_that_do_not_precede,
    "gives tokens that its model has not": _tokens_that_its_model_has_not,
}


def _check_that_it_is_cut_off(
    run: RunDrafter, kind: type[Any], model: Path, expected: Traces, fault: str, depth: int = 1
) -> None:
    """A drafter errs in its third guess; the requests' tokens are those without one."""
    calls: list[None] = []

    def guess(drafter: Any, seen: Observation) -> Any:
        calls.append(None)
        return (FAULTS[fault] if len(calls) == 3 else kind.guess)(drafter, seen)

    erring = type("Erring", (kind,), {"guess": guess})
    case = Case(batch=3, chunk=9)
    got, _ = run(erring, model, case, depth=depth, may_be_cut_off=["drafter"])
    assert len(calls) == 3
    assert differences(expected, got, 1e-5) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_drafter_that_errs_is_cut_off_and_requests_go_on(
    run_drafter: RunDrafter, second: Path, expected: Traces, fault: str
) -> None:
    _check_that_it_is_cut_off(run_drafter, SecondModel, second, expected, fault)


@pytest.mark.parametrize("fault", ["raises", "is out of memory", "answers something else"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_drafter_of_trees_that_errs_is_cut_off_and_requests_go_on(
    run_drafter: RunDrafter, layer: Path, expected: Traces, fault: str, depth: int
) -> None:
    _check_that_it_is_cut_off(run_drafter, Branching, layer, expected, fault, depth)


def test_a_model_drafter_has_no_slots_once_it_has_proposed(
    run_drafter: RunDrafter, second: Path, expected: Traces
) -> None:
    """By the time of `release` the blocks of a row may be another's."""
    refusals: list[str] = []

    class WritesLate(SecondModel):
        def release(self, row: int, num_tokens: int) -> None:
            offsets, ids = np.array([0, 1], np.int32), torch.zeros(1, dtype=torch.int64)
            late = UnitTokens(np.array([row], np.int32), offsets, np.array([0], np.int32), ids)
            with pytest.raises(EngineError) as refused:
                self.unit.forward(late)
            refusals.append(str(refused.value))
            super().release(row, num_tokens)

    got, _ = run_drafter(WritesLate, second, Case(batch=3))
    assert differences(expected, got, 1e-5) == []
    assert refusals and all("slots 0 to 1; set aside: 0" in line for line in refusals)


def test_a_model_drafter_that_is_far_too_slow_is_cut_off(
    run_drafter: RunDrafter, second: Path, expected: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_drafter, "MAX_CALL_S", 0.0)
    got, drafter = run_drafter(SecondModel, second, Case(batch=3), may_be_cut_off=["drafter"])
    assert drafter.proposals == []
    assert differences(expected, got, 1e-5) == []


class NoMask(TorchAttention):
    """Does not say that it masks trees."""

    manifest: ClassVar[dict[str, Any]] = {
        "layout": "pegboard.builtin.torch_attention_layout:layout",
        "promises": ["window", "soft_cap"],
    }


@pytest.mark.parametrize(("kind", "drafts"), [(OneLayer, True), (Branching, False)])
def test_trees_need_attention_that_masks_them(
    run_drafter: RunDrafter,
    layer: Path,
    expected: Traces,
    kind: type[OneLayer],
    drafts: bool,
) -> None:
    """Each model has a backend of its own, made by the class."""
    may_err = [] if drafts else ["drafter"]
    got, drafter = run_drafter(kind, layer, Case(batch=3), may_be_cut_off=may_err, attention=NoMask)
    assert any(one.token_ids for one in drafter.proposals) == drafts
    assert differences(expected, got, 1e-5) == []
