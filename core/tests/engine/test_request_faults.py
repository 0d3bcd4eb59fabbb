"""A fault with one request ends that request alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pegboard.errors import RequestError, RequestFailed
from pegboard.interfaces.observer import ErrorHappened, Event, Observer
from pegboard.testing.erring_drafter import Panic

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]

FAULTS = [MemoryError(), RecursionError("deep"), ValueError("broke"), SystemExit(3)]


class Errors(Observer):
    def __init__(self) -> None:
        self.seen: list[ErrorHappened] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, ErrorHappened):
            self.seen.append(event)

    def close(self) -> None: ...


class Letters:
    """A detokenizer that raises once it has been given so many tokens; -1: when it is to finish."""

    def __init__(self, fails_at: int | None, error: BaseException) -> None:
        self.num_left = fails_at
        self.error = error

    def add(self, token_ids: Any) -> str:
        if self.num_left == 0:
            raise self.error
        if self.num_left is not None:
            self.num_left -= 1
        return "a" * len(token_ids)

    def finish(self) -> str:
        if self.num_left is not None and self.num_left < 0:
            raise self.error
        return ""


def _raises_for(seed: int, error: BaseException) -> Callable[[Any], dict[str, Any]]:
    def params_of(params: Any) -> dict[str, Any]:
        if params.seed == seed:
            raise error
        return {}

    return params_of


@pytest.mark.parametrize("error", [*FAULTS, Panic("rust")], ids=repr)
def test_a_validator_that_raises_fails_its_request_alone(
    bench: Make, expected: Expected, error: BaseException
) -> None:
    errors = Errors()
    engine = bench(processor_params=_raises_for(13, error), observers=(errors,))
    engine.add("stays", [1, 2], max_tokens=5)
    with pytest.raises(RequestFailed, match=type(error).__name__) as caught:
        engine.add("fails", [1, 2], max_tokens=5, seed=13)
    assert caught.value.__cause__ is error
    assert (engine.core.num_running, engine.core.num_waiting) == (0, 1)
    assert [event.request_id for event in errors.seen] == ["fails"]
    engine.add("fails", [3], max_tokens=5)  # the name is free
    outputs = engine.run()
    assert outputs["stays", 0].token_ids == expected([1, 2], 5)
    assert outputs["fails", 0].token_ids == expected([3], 5)


def test_an_interrupt_is_no_fault_of_a_request(bench: Make) -> None:
    engine = bench(processor_params=_raises_for(13, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        engine.add("a", [1], seed=13)


@pytest.mark.parametrize("num_made", [0, 3])
def test_a_sequence_that_cannot_be_made_leaves_no_other(
    bench: Make, expected: Expected, num_made: int
) -> None:
    made: list[None] = []

    def make() -> Letters:
        if len(made) == num_made:
            made.append(None)
            raise MemoryError
        made.append(None)
        return Letters(None, MemoryError())

    engine = bench(make_detokenizer=make, seed=7)
    with pytest.raises(RequestFailed, match="MemoryError"):
        engine.add("fails", [1, 2], n=5)
    assert not engine.core.has_work()
    engine.add("stays", [1, 2], max_tokens=5, n=5)
    assert engine.run()["stays", 4].token_ids == expected([1, 2], 5, 0, 4)


def test_a_request_that_failed_draws_no_seed(bench: Make) -> None:
    tokens = []
    for fails in (False, True):
        engine = bench(processor_params=_raises_for(13, MemoryError()), seed=7)
        if fails:
            with pytest.raises(RequestFailed):
                engine.add("fails", [1], seed=13)
        engine.add("a", [1], max_tokens=9, seed=None)
        tokens.append(engine.run()["a", 0].token_ids)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("error", [*FAULTS, Panic("rust")], ids=repr)
@pytest.mark.parametrize("fails_at", [0, 4, -1])
def test_text_that_cannot_be_made_ends_its_request_alone(
    bench: Make, expected: Expected, fails_at: int, error: BaseException
) -> None:
    made: list[Letters] = []

    def make() -> Letters:
        made.append(Letters(fails_at if len(made) == 1 else None, error))
        return made[-1]

    engine = bench(make_detokenizer=make, num_speculative_tokens=2)
    engine.add("fails", [1, 2, 3], max_tokens=8, n=3)
    engine.add("stays", [1, 2], max_tokens=12)
    outputs = engine.run()
    assert outputs["stays", 0].token_ids == expected([1, 2], 12)
    ends = {outputs["fails", index].last for index in range(3)}
    errors = [end for end in ends if end.finish_reason == "error"]
    assert errors and all(type(error).__name__ in str(end.error) for end in errors)
    assert outputs["fails", 1].last in errors
    engine.add("again", [3], max_tokens=5)
    assert engine.run()["again", 0].token_ids == expected([3], 5)


DEEP: Any = "x"
for _ in range(2000):
    DEEP = [DEEP]

NOT_PLAIN = [object(), 2**80, {"deep": DEEP}, np.zeros(2)]


@pytest.mark.parametrize("values", NOT_PLAIN, ids=["object", "int", "deep", "array"])
def test_parameters_that_cannot_travel_are_met_at_intake(bench: Make, values: Any) -> None:
    """Else the batch that admits the row could not be built, and all requests would end. Who made them
    is at fault: the client who sent them, or the plugin."""
    engine = bench(processor_params=lambda params: {"mine": {"values": values}})
    with pytest.raises(RequestFailed, match="taken: what logits processor 'mine' made of"):
        engine.add("a", [1])
    with pytest.raises(RequestError, match=r"processors: .*(plain values|nested too deeply)"):
        engine.add("a", [1], processors={"mine": {"values": values}})
    assert not engine.core.has_work()


class Broken:
    """Prompt logprobs that cannot be kept."""

    is_complete = False

    def add(self, *_: Any) -> None:
        raise Panic


def test_prompt_logprobs_that_cannot_be_kept_end_their_request_alone(
    bench: Make, expected: Expected
) -> None:
    engine = bench()
    engine.add("fails", [1, 2, 3], max_tokens=5, prompt_logprobs=1)
    engine.add("stays", [1, 2, 3], max_tokens=5, prompt_logprobs=1)
    engine.core._queue.request("fails").prompt_logprobs = Broken()
    outputs = engine.run()
    assert "Panic" in str(outputs["fails", 0].last.error)
    assert outputs["stays", 0].token_ids == expected([1, 2, 3], 5)


def test_where_no_token_is_left_a_request_is_refused(bench: Make) -> None:
    every = tuple(range(97))
    engine = bench(eos_token_ids=(96, 200))
    for stop, values in ((every, {}), (every[:-1], {}), (every, {"ignore_eos": True})):
        with pytest.raises(RequestError, match=r"stop_token_ids.*every token.*fix"):
            engine.add("a", [1], min_tokens=2, stop_token_ids=stop, **values)
    engine.add("a", [1], min_tokens=2, stop_token_ids=every[:-1], ignore_eos=True)
    engine.add("b", [1], stop_token_ids=every)
    assert not [output for output in engine.run().values() if output.last.error]
