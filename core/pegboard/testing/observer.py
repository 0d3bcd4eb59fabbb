"""Contract suite of `Observer`, and of `MetricsText` where the observer offers it.

class TestMyObserver(ObserverContract):
    @pytest.fixture
    def make(self):
        return MyObserver               # called with an ObserverContext
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest

from pegboard.interfaces.kv_allocator import KVLedger
from pegboard.interfaces.observer import (
    BlocksNamed,
    BreakerChanged,
    ErrorHappened,
    Event,
    LoadChanged,
    MetricsText,
    Observer,
    ObserverContext,
    RequestArrived,
    SequenceFinished,
    StepDone,
    StepDrafts,
)
from pegboard.request import FinishReason

MakeObserver = Callable[[ObserverContext], Observer]

MAX_EVENT_S = 0.002
"""Most CPU time an event, in the mean: a step of a small model takes some milliseconds."""


def step(
    step_id: int, **values: int | tuple[float, ...] | tuple[KVLedger, ...] | StepDrafts
) -> StepDone:
    """A step of one decoding sequence."""
    usual = {
        "num_prefill_tokens": 0,
        "num_decode_tokens": 1,
        "num_output_tokens": 1,
        "num_running": 1,
        "num_waiting": 0,
        "num_preempted": 0,
        "num_tried": 0,
        "num_accepted": 0,
        "kv": (KVLedger(total=10, free=4, held=3, cached=2, pinned=1),),
    }
    return StepDone(step_id, 10.0 + step_id, 0.5, 0.3, 0.1, 0.0, **usual | values)  # type: ignore[arg-type]


def end(reason: FinishReason, *, began: bool = True) -> SequenceFinished:
    """The end of a sequence that ran, or of one that waited in vain."""
    admitted, first_token, num_output = (2.0, 3.0, 5) if began else (None, None, 0)
    return SequenceFinished("r", 0, reason, 1.0, admitted, first_token, 9.0, 20, 16, num_output, 0)


DRAFTS = StepDrafts(
    verified=(0, 0, 0, 0, 0, 1), tried=(0, 0, 0, 0, 1), accepted=(0, 0, 0, 1), num_asked=5
)

LIFE: tuple[Event, ...] = (
    RequestArrived("r", 1.0, num_prompt_tokens=20, num_sequences=2, max_tokens=5),
    step(0, num_prefill_tokens=20, first_token_s=(2.0, 2.0)),
    BlocksNamed(1, stored=((0, bytes(16)), (1, bytes(16)))),
    step(1, num_tried=4, num_accepted=3, inter_token_s=(0.01, 0.0), drafts=DRAFTS),
    step(2, num_preempted=1, num_running=0, num_waiting=2, num_output_tokens=0),
    ErrorHappened("EngineError", "worker 0 is not running", "r"),
    ErrorHappened("PrefixCacheMistake", "a hit that does not hold"),
    BreakerChanged("prefix_cache", "trie", True, "a hit that does not hold"),
    BreakerChanged("prefix_cache", "trie", False, "a hit that does not hold"),
    end("stop"),
    end("length"),
    BlocksNamed(2, stored=((0, b"0123456789abcdef"),), evicted=((0, bytes(16)),)),
    LoadChanged(9.0, 0, 0, (KVLedger(total=10, free=8, held=0, cached=2),)),
    BlocksNamed(3, cleared=True),
)
"""All kinds of events, in an order in which they come."""


class ObserverContract:
    """The contract of every observer."""

    @pytest.fixture
    def make(self) -> MakeObserver:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    def observer(self, make: MakeObserver) -> Observer:
        ledger = {"weights": 1000, "KV": 64}
        return make(ObserverContext("model", ledger, num_speculative_tokens=5))

    def test_every_event_is_heard(self, make: MakeObserver) -> None:
        observer = self.observer(make)
        for event in LIFE:
            observer.observe(event)
        observer.close()

    def test_nothing_is_changed(self, make: MakeObserver) -> None:
        ledger = {"weights": 1000}
        observer = make(ObserverContext("model", ledger))
        events = copy.deepcopy(LIFE)
        for event in events:
            observer.observe(event)
        assert (events, ledger) == (LIFE, {"weights": 1000})

    @pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
    def test_what_never_began_may_end(self, make: MakeObserver, reason: FinishReason) -> None:
        observer = self.observer(make)
        observer.observe(RequestArrived("r", 1.0, num_prompt_tokens=20, num_sequences=1))
        observer.observe(end(reason, began=False))

    def test_a_step_of_nothing_is_heard(self, make: MakeObserver) -> None:
        observer = self.observer(make)
        observer.observe(step(0, num_decode_tokens=0, num_output_tokens=0, num_running=0, kv=()))
        observer.observe(step(1, kv=(KVLedger(total=0, free=0, held=0),)))

    def test_observers_share_nothing(self, make: MakeObserver) -> None:
        first, second = self.observer(make), self.observer(make)
        before = _text(second)
        for event in LIFE:
            first.observe(event)
        first.close()
        assert _text(second) == before
        second.observe(LIFE[0])

    def test_closing_twice_does_nothing(self, make: MakeObserver) -> None:
        observer = self.observer(make)
        observer.close()
        observer.close()

    def test_an_event_takes_little_time(self, make: MakeObserver) -> None:
        observer = self.observer(make)
        events = [LIFE[0], *(step(i, inter_token_s=(0.01,) * 8) for i in range(100)), end("stop")]
        started = time.process_time()
        for event in events:
            observer.observe(event)
        assert (time.process_time() - started) / len(events) < MAX_EVENT_S

    def test_metrics_are_prometheus_text_that_grows(self, make: MakeObserver) -> None:
        observer = self.observer(make)
        if not isinstance(observer, MetricsText):
            pytest.skip("the observer renders no metrics")
        before = _samples(observer.render())
        for event in LIFE:
            observer.observe(event)
        after = _samples(observer.render())
        assert after and before.keys() <= after.keys()
        assert after != before


def _text(observer: Observer) -> str:
    return observer.render() if isinstance(observer, MetricsText) else ""


def _samples(text: str) -> dict[str, float]:
    """Name and labels to a number, times of creation left out."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
