"""Parts that raise, call back, or are interrupted: the engine goes on whole, or ends all requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pegboard.engine import core as core_module
from pegboard.engine.breaker import FIRST_PAUSE_S
from pegboard.errors import EngineError, RequestError
from pegboard.interfaces.observer import ErrorHappened, Event, MetricsText, Observer, StepDone
from pegboard.interfaces.prefix_cache import Hit, Prefix
from pegboard.interfaces.scheduler import QueueView, Scheduler, StepBuilder
from pegboard.testing.erring_drafter import Panic

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]


class Listening(Observer):
    """Calls a function with each event, and keeps those of errors."""

    def __init__(self, then: Callable[[Event], object] = lambda event: None) -> None:
        self.then = then
        self.errors: list[ErrorHappened] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, ErrorHappened):
            self.errors.append(event)
        self.then(event)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("prompt", [(1, 2.5), (1, "2"), (True, 2), (1, None), ([1],)])
def test_a_prompt_of_anything_but_ids_is_refused(bench: Make, prompt: Any) -> None:
    engine = bench()
    with pytest.raises(RequestError, match="prompt"):
        engine.add("a", prompt)
    assert not engine.core.has_work()


def test_a_prompt_may_be_an_array(bench: Make, expected: Expected) -> None:
    engine = bench()
    engine.add("a", np.arange(1, 4), max_tokens=5)
    assert engine.run()["a", 0].token_ids == expected([1, 2, 3], 5)


def _raise(error: BaseException) -> Callable[..., Any]:
    def raising(*_: Any, **__: Any) -> Any:
        raise error

    return raising


PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "execute": lambda engine: (engine.worker, "execute"),
    "batch": lambda engine: (core_module, "build_batch"),
    "trim": lambda engine: (engine.allocator, "trim"),
    "release": lambda engine: (engine.allocator, "release"),
    "fence": lambda engine: (engine.allocator, "fence"),
    "ledger": lambda engine: (engine.core, "ledger"),
}


@pytest.mark.parametrize("error", [ValueError("broke"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_breaks_off_ends_all_requests_once(
    bench: Make,
    dict_cache: Any,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: BaseException,
) -> None:
    engine = bench(
        cache=dict_cache,
        windows=(6,),
        max_num_seqs=3,
        num_speculative_tokens=3,
        observers=(Listening(),),
    )
    for number in range(4):
        engine.add(f"{number}", [number] * 9, max_tokens=6 + number % 2, n=2)
    monkeypatch.setattr(*PLACES[place](engine), _raise(error))
    deltas = []
    with pytest.raises(EngineError if isinstance(error, Exception) else KeyboardInterrupt):
        for _ in range(100):
            deltas += engine.core.step()
    monkeypatch.undo()

    while engine.core.has_work():
        deltas += engine.core.step()
    ends = [(delta.request_id, delta.index) for delta in deltas if delta.finish_reason]
    assert sorted(ends) == [(f"{number}", index) for number in range(4) for index in range(2)]
    lines = {delta.error for delta in deltas if delta.finish_reason == "error"}
    assert len(lines) == 1 and type(error).__name__ in lines.pop()
    assert engine.core.num_running == engine.core.num_waiting == 0
    with pytest.raises(EngineError, match=type(error).__name__):
        engine.add("late", [1])
    engine.core.close()


def test_closing_ends_open_requests(bench: Make) -> None:
    engine = bench()
    engine.add("a", [1, 2], max_tokens=50, n=2)
    engine.core.step()
    engine.core.close()
    assert [delta.finish_reason for delta in engine.core.step()] == ["abort", "abort"]
    assert not engine.core.has_work()


class Calling(Scheduler):
    """Calls back before it plans, in its second step."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.num_steps = 0

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        self.num_steps += 1
        for seq in (*queue.running, *queue.waiting):
            step.add(seq, 3)
        if self.num_steps == 2:
            self.call()


CALLS: dict[str, Callable[[Any], object]] = {
    "step": lambda engine: engine.core.step(),
    "abort": lambda engine: engine.core.abort("a"),
    "add": lambda engine: engine.add("new", [1]),
    "close": lambda engine: engine.core.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_scheduler_that_calls_back_is_cut_off(bench: Make, expected: Expected, call: str) -> None:
    calling = Calling(lambda: CALLS[call](engine))
    engine = bench(scheduler=lambda context: calling)
    engine.add("a", [1, 2, 3, 4], max_tokens=6)
    assert engine.run()["a", 0].token_ids == expected([1, 2, 3, 4], 6)
    (cut_off,) = engine.core.cut_off
    assert (cut_off.part, cut_off.name) == ("scheduler", "Calling")
    assert f"{call} was called while step runs" in cut_off.reason


@pytest.mark.parametrize("call", CALLS)
def test_an_observer_that_calls_back_is_cut_off(bench: Make, expected: Expected, call: str) -> None:
    def then(event: Event) -> None:
        if isinstance(event, StepDone):
            CALLS[call](engine)

    engine = bench(observers=(Listening(then),))
    engine.add("a", [1, 2, 3, 4], max_tokens=6)
    assert engine.run()["a", 0].token_ids == expected([1, 2, 3, 4], 6)
    assert engine.core.observers == ()


@pytest.mark.parametrize("error", [SystemExit(3), Panic()], ids=repr)
def test_an_observer_cannot_end_the_engine(
    bench: Make, expected: Expected, error: BaseException
) -> None:
    observer = Listening(_raise(error))
    observer.close = _raise(error)  # type: ignore[method-assign]
    engine = bench(observers=(observer,))
    engine.add("a", [1, 2], max_tokens=6)
    assert engine.run()["a", 0].token_ids == expected([1, 2], 6)
    engine.core.close()


class Stumbling(Observer, MetricsText):
    """Raises at its second event, or whenever it is asked for its metrics."""

    def __init__(self, metrics: object = "m 1\n") -> None:
        self.heard: list[Event] = []
        self.missed: list[int] = []
        self.metrics = metrics

    def observe(self, event: Event) -> None:
        self.heard.append(event)
        if len(self.heard) == 2:
            raise ValueError("oops")

    def resync(self, num_missed: int) -> None:
        self.missed.append(num_missed)

    def render(self) -> Any:
        if isinstance(self.metrics, Exception):
            raise self.metrics
        return self.metrics

    def close(self) -> None:
        pass


@pytest.mark.parametrize("depth", [1])
def test_an_observer_is_told_what_it_missed_when_it_is_back(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything: list[Event] = []
    stumbling = Stumbling()
    engine = bench(observers=(stumbling, Listening(everything.append)))
    engine.add("a", [1, 2], max_tokens=3)
    engine.step()
    assert len(stumbling.heard) == 2 and engine.core.metrics() == ""
    (cut_off,) = engine.core.cut_off
    assert (cut_off.part, cut_off.name) == ("observer", "Stumbling")
    engine.step()
    assert len(stumbling.heard) == 2 and stumbling.missed == []
    now = time.monotonic() + FIRST_PAUSE_S
    for breaker in engine.core._observers.breakers:
        monkeypatch.setattr(breaker, "_clock", lambda: now)
    engine.run()
    assert engine.core.metrics() == "m 1\n" and not engine.core.cut_off
    (num_missed,) = stumbling.missed
    assert len(stumbling.heard) + num_missed == len(everything)
    assert stumbling.heard[2:] == everything[2 + num_missed :]


@pytest.mark.parametrize("metrics", [None, 3, ValueError("no text")], ids=repr)
def test_an_observer_that_renders_no_text_is_cut_off(bench: Make, metrics: object) -> None:
    engine = bench(observers=(Stumbling(metrics), Stumbling()))
    assert engine.core.metrics() == "m 1\n"
    assert [cut_off.name for cut_off in engine.core.cut_off] == ["Stumbling"]


class Stale(Scheduler):
    """Asks the builder of the step before, too."""

    def __init__(self) -> None:
        self.last: StepBuilder | None = None
        self.answers: set[bool] = set()

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        every = (*queue.running, *queue.waiting)
        if self.last is not None:
            for seq in every:
                self.answers |= {self.last.add(seq, 1), self.last.preempt(seq)}
        for seq in every:
            step.add(seq, 50)
        self.last = step


def test_a_builder_is_closed_when_its_step_is_planned(bench: Make, expected: Expected) -> None:
    stale = Stale()
    engine = bench(scheduler=lambda context: stale, max_num_seqs=2)
    for number in range(5):
        engine.add(f"{number}", [number, 1, 2], max_tokens=5)
    outputs = engine.run()
    assert stale.answers == {False}
    for number in range(5):
        assert outputs[f"{number}", 0].token_ids == expected([number, 1, 2], 5)


@pytest.mark.parametrize("depth", [1])
def test_a_drafter_that_the_worker_cut_off_is_asked_again_after_a_pause(
    bench: Make, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = Listening()
    engine = bench(num_speculative_tokens=3, observers=(listening,), drafter_name="mine")
    breaker = engine.core._speculation.drafter

    def run(name: str) -> tuple[int, int, set[int]]:
        """Drafts proposed and verified, and the trials that the worker was told of."""
        before = len(engine.worker.batches)
        engine.add(name, [1, 2, 3, 4], max_tokens=20)
        assert engine.run()[name, 0].token_ids == expected([1, 2, 3, 4], 20)
        batches = engine.worker.batches[before:]
        asked = sum(int(batch.propose.sum()) for batch in batches)
        verified = sum(int(batch.verify.sum()) for batch in batches)
        return asked, verified, {batch.drafter_trial for batch in batches}

    asked, verified, trials = run("well")
    assert asked > 0 and verified > 0 and trials == {0}
    engine.add("errs", [1, 2, 3, 4], max_tokens=20)
    engine.step()
    engine.worker.drafter_failed = "ValueError: no guess"
    engine.step()
    engine.worker.drafter_failed = ""
    (cut_off,) = engine.core.cut_off
    assert (cut_off.part, cut_off.name) == ("drafter", "mine")
    assert cut_off.reason == "ValueError: no guess"
    assert run("cut off")[0] == 0
    assert engine.outputs["errs", 0].token_ids == expected([1, 2, 3, 4], 20)
    (error,) = listening.errors
    assert "drafter 'mine' is cut off for 1 s: ValueError: no guess" in error.message

    later = time.monotonic() + FIRST_PAUSE_S
    monkeypatch.setattr(breaker, "_clock", lambda: later)
    assert run("back")[2] == {1}
    assert run("and stays")[0] == asked
    assert engine.core.cut_off == () and not breaker.is_on_trial


def test_a_cache_cannot_write_to_the_tokens_that_it_is_shown(
    bench: Make, dict_cache: Any, expected: Expected
) -> None:
    refused = []

    class Writing(dict_cache):  # type: ignore[misc]
        def match(self, prefix: Prefix, limit: int) -> Hit:
            try:
                prefix.token_ids[0] = 0
            except ValueError:
                refused.append(prefix)
            hit: Hit = super().match(prefix, limit)
            return hit

    engine = bench(cache=Writing)
    for turn in range(2):
        engine.add(f"{turn}", range(1, 20), max_tokens=5)
        assert engine.run()[f"{turn}", 0].token_ids == expected(range(1, 20), 5)
    assert refused
