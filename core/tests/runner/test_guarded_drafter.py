"""A drafter that errs is cut off there and then, is not called until it is tried again, and changes no
token."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pegboard.errors import MAX_REASON_LEN
from pegboard.interfaces.drafter import Drafter, Observation
from pegboard.runner import guarded_drafter
from pegboard.testing.erring_drafter import ANSWERS, ERRORS, nodes_of

PROMPTS = {0: list(range(40, 63)), 2: [7, 300, 7, 300, 12], 5: [101]}
LENGTH = 10
METHODS = ("admit", "release", "propose")


class Noting(Drafter):
    """Guesses one token for each row that it has, notes what it is told, and once does something else.

    Args:
        method, deed: what is done in the first call of a method that follows `arm`.
    """

    def __init__(self, method: str = "", deed: Callable[..., Any] = lambda *_: None) -> None:
        self.method = method
        self.deed = deed
        self.is_armed = False
        self.calls: list[str] = []
        self.rows: dict[int, int] = {}
        self.releases: list[tuple[int, int]] = []
        self.shown: list[int] = []

    def admit(self, admission: Any, block_tables: Any) -> None:
        self._note("admit", admission)
        assert admission.row not in self.rows, "the row has an owner"
        self.rows[admission.row] = len(admission.token_ids)

    def release(self, row: int, num_tokens: int) -> None:
        self.releases.append((row, num_tokens))
        del self.rows[row]
        self._note("release", row)

    def propose(self, seen: Observation) -> Any:
        self.shown = seen.rows.tolist()
        assert self.rows.keys() >= set(self.shown), "a row that it was not told of"
        for i, row in enumerate(self.shown):
            own = slice(seen.offsets[i], seen.offsets[i + 1])
            assert len(seen.token_ids[own]) == len(seen.positions[own]) > 0
            assert np.diff(seen.positions[own]).tolist() == [1] * (len(seen.positions[own]) - 1)
            self.rows[row] += int(seen.next_offsets[i + 1] - seen.next_offsets[i])
        answer = self._note("propose", seen)
        if answer is not None:
            return answer[0]
        return nodes_of(seen.rows, np.minimum(seen.propose, 1).tolist(), token=7)

    def _note(self, method: str, argument: Any) -> Any:
        self.calls.append(method)
        if self.is_armed and method == self.method:
            self.is_armed = False
            return (self.deed(argument),)
        return None


def _raise(error: BaseException) -> Any:
    raise error


@pytest.fixture
def expected(make_host: Any) -> dict[int, list[int]]:
    host = make_host()
    for row, prompt in PROMPTS.items():
        host.admit(row, prompt)
    host.prefill(PROMPTS)
    host.decode(PROMPTS, LENGTH)
    return {row: host.output(row) for row in PROMPTS}


def drive(host: Any, drafter: Noting, expected: dict[int, list[int]], reason: str) -> None:
    """Two rows run; in the step in which a third one comes and one of them goes, the drafter errs."""
    for row in (0, 2):
        host.admit(row, PROMPTS[row])
    host.prefill([0, 2], propose=3)
    assert host.results[-1].num_drafts.tolist() == [1, 1]
    drafter.is_armed = True
    host.release(2)
    host.admit(5, PROMPTS[5])
    result = host.step({0: 1, 5: 1}, propose=3)
    assert not drafter.is_armed
    assert result.drafter_failed and reason in result.drafter_failed
    assert result.num_drafts.tolist() == [0, 0]
    num_calls, num_steps, before = len(drafter.calls), len(host.results), dict(drafter.rows)

    host.release(5)
    host.admit(2, PROMPTS[2])
    host.prefill([2], propose=3)
    host.decode([0, 2], 5, propose=3)
    host.admit(5, PROMPTS[5])
    host.prefill([5], propose=3)
    assert len(drafter.calls) == num_calls, "it was called while it was cut off"
    assert not any(result.drafter_failed for result in host.results[num_steps:])

    drafter.releases.clear()
    for row in (2, 5):
        host.release(row)
        host.admit(row, PROMPTS[row])
    host.step({0: 1, 5: 1, 2: len(PROMPTS[2])}, propose=3, drafter_trial=1)
    told = sorted(row for row, _ in drafter.releases)
    assert told == sorted(before), "all rows that it had are given back, once, and no other"
    assert all(count <= before[row] for row, count in drafter.releases)
    assert drafter.shown == [5, 2]
    assert host.results[-1].num_drafts.tolist() == [0, 1, 1]
    host.decode(PROMPTS, LENGTH, propose=3, drafter_trial=1)
    assert {row: host.output(row, LENGTH) for row in PROMPTS} == expected


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", METHODS)
def test_what_raises_is_cut_off(make_host: Any, expected: Any, method: str, error: str) -> None:
    drafter = Noting(method, lambda _: _raise(ERRORS[error]()))
    drive(make_host(drafter=drafter), drafter, expected, error)


def test_a_long_reason_is_cut_and_says_where(make_host: Any, expected: Any) -> None:
    drafter = Noting("propose", lambda _: _raise(ValueError("no" * 10**6)))
    host = make_host(drafter=drafter)
    drive(host, drafter, expected, " in _raise)")
    (failure,) = [result.drafter_failed for result in host.results if result.drafter_failed]
    assert len(failure) == MAX_REASON_LEN


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_cannot_be_used_is_cut_off(make_host: Any, expected: Any, answer: str) -> None:
    drafter = Noting("propose", ANSWERS[answer])
    drive(make_host(drafter=drafter), drafter, expected, "")


@pytest.mark.parametrize("method", METHODS)
def test_what_takes_far_too_long_is_cut_off(
    make_host: Any, expected: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dawdle(_: Any) -> Any:
        time.sleep(0.3)
        return nodes_of([], [])

    drafter = Noting(method, dawdle)
    monkeypatch.setattr(guarded_drafter, "MAX_CALL_S", 0.25)
    drive(make_host(drafter=drafter), drafter, expected, f"{method} took 0.3 s; allowed: 0.25")


def test_a_drafter_may_take_as_long_as_the_forward(
    make_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model reads the prompt that the target reads."""

    def dawdle(_: Any) -> Any:
        time.sleep(0.1)
        return nodes_of([], [])

    drafter = Noting("propose", dawdle)
    monkeypatch.setattr(guarded_drafter, "MAX_CALL_S", 0.05)
    host = make_host(drafter=drafter)
    model = host.runner._loaded.units.target.model
    forward = model.forward

    def slow(*arguments: Any) -> Any:
        time.sleep(1.0)
        return forward(*arguments)

    host.admit(0, PROMPTS[0])
    model.forward = slow
    drafter.is_armed = True
    host.prefill([0])
    assert [result.drafter_failed for result in host.results] == [""]
    model.forward = forward
    drafter.is_armed = True
    host.step({0: 1})
    assert "propose took 0.1 s" in host.results[-1].drafter_failed


def test_no_hidden_states_are_kept_for_a_drafter_that_is_cut_off(make_host: Any) -> None:
    drafter = Noting("propose", lambda _: _raise(ValueError("no")))
    drafter.taps = (-1, 1)
    host = make_host(drafter=drafter)
    wanted = []
    model = host.runner._loaded.units.target.model
    forward = model.forward

    def noting(ids: Any, positions: Any, taps: tuple[int, ...]) -> Any:
        wanted.append(taps)
        return forward(ids, positions, taps)

    model.forward = noting
    host.admit(0, PROMPTS[0])
    host.prefill([0])
    drafter.is_armed = True
    for _ in range(2):
        host.step({0: 1})
    assert wanted == [(-1, 1), (-1, 1), ()]


def test_a_model_without_the_hidden_states_costs_the_drafter_alone(
    make_host: Any, expected: Any
) -> None:
    drafter = Noting()
    drafter.taps = (1,)
    host = make_host(drafter=drafter)
    forward = host.runner._loaded.units.target.model.forward
    host.runner._loaded.units.target.model.forward = lambda ids, positions, taps: forward(
        ids, positions
    )
    host.admit(0, PROMPTS[0])
    host.prefill([0])
    assert host.results[0].drafter_failed == (
        "it wants the inputs of layers [1], which the model does not give"
    )
    host.decode([0], LENGTH)
    assert host.output(0) == expected[0]


def test_it_hears_of_a_reset_once_and_as_soon_as_it_is_there(make_host: Any) -> None:
    heard: list[int] = []

    class Keeping(Noting):
        def forget(self) -> None:
            heard.append(len(host.results))

    drafter = Keeping("propose", lambda _: _raise(ValueError("no")))
    host = make_host(drafter=drafter)
    host.admit(0, PROMPTS[0])
    host.prefill([0], propose=3)
    for _ in range(2):
        host.step({0: 1}, num_resets=1)
    assert heard == [1]
    drafter.is_armed = True
    host.step({0: 1}, propose=3, num_resets=1)
    host.step({0: 1}, num_resets=2)
    assert heard == [1]
    host.step({0: 1}, num_resets=2, drafter_trial=1)
    host.step({0: 1}, num_resets=2, drafter_trial=1)
    assert heard == [1, 5]
