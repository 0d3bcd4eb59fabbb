"""The calls that a breaker lets through, and when."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.engine.breaker import FIRST_PAUSE_S, MAX_CALL_S, MAX_PAUSE_S, Breaker, PluginErred
from pegboard.errors import MAX_REASON_LEN
from pegboard.interfaces.observer import BreakerChanged, ErrorHappened
from pegboard.testing.erring_drafter import Panic


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker("prefix_cache", "trie", clock)


def fail(error: BaseException) -> Any:
    raise error


def trip(breaker: Breaker, error: BaseException | None = None) -> None:
    with pytest.raises(PluginErred):
        breaker.call(fail, error or ValueError("no"))


def pause(breaker: Breaker, clock: Clock) -> float:
    """Seconds until the next trial, which is begun."""
    assert not breaker.retry(lambda: None)
    started = clock.now
    while not breaker.retry(lambda: None):
        clock.now += FIRST_PAUSE_S / 4
    return clock.now - started


def test_answers_come_through(breaker: Breaker) -> None:
    assert breaker.call(divmod, 7, 2) == (3, 1)
    assert breaker.retry(lambda: fail(AssertionError("there is nothing to resync")))
    assert not breaker.is_open and breaker.cut_off is None and breaker.take_news() == []


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), RecursionError(), Panic()], ids=repr
)
def test_what_raises_is_cut_off(breaker: Breaker, error: BaseException) -> None:
    trip(breaker, error)
    assert breaker.is_open and breaker.cut_off is not None
    assert breaker.cut_off.reason.startswith(type(error).__name__)
    assert "test_breaker.py" in breaker.cut_off.reason and "in fail" in breaker.cut_off.reason
    happened, changed = breaker.take_news()
    assert isinstance(happened, ErrorHappened) and happened.kind == type(error).__name__
    assert "prefix_cache 'trie' is cut off for 1 s" in happened.message
    assert changed == BreakerChanged("prefix_cache", "trie", True, breaker.cut_off.reason)
    assert breaker.take_news() == []


def test_an_error_that_cannot_be_shown_is_named(breaker: Breaker) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    trip(breaker, Mute())
    assert breaker.cut_off is not None and breaker.cut_off.reason.startswith("Mute")


def test_a_reason_is_short_and_says_where(breaker: Breaker) -> None:
    trip(breaker, ValueError("no" * MAX_REASON_LEN))
    assert breaker.cut_off is not None and len(breaker.cut_off.reason) == MAX_REASON_LEN
    assert breaker.cut_off.reason.endswith(" in fail)")


def test_an_interruption_is_nobodys_mistake(breaker: Breaker) -> None:
    with pytest.raises(KeyboardInterrupt):
        breaker.call(fail, KeyboardInterrupt())
    assert not breaker.is_open


def test_what_takes_too_long_is_cut_off(breaker: Breaker, clock: Clock) -> None:
    def think(seconds: float) -> None:
        clock.now += seconds

    breaker.call(think, MAX_CALL_S)
    with pytest.raises(PluginErred):
        breaker.call(think, MAX_CALL_S + 1)
    assert breaker.cut_off is not None and breaker.cut_off.reason.startswith("think took 6.0 s")
    assert breaker.seconds == 2 * MAX_CALL_S + 1


def test_a_mistake_cuts_off_and_is_named(breaker: Breaker) -> None:
    breaker.mistake("block 7 twice")
    breaker.mistake("block 8 twice")
    assert breaker.cut_off is not None and breaker.cut_off.reason == "block 7 twice"
    happened, _ = breaker.take_news()
    assert isinstance(happened, ErrorHappened) and happened.kind == "PrefixCacheMistake"


def test_a_trial_that_ends_well_brings_it_back(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    heard: list[int] = []
    assert not breaker.retry(heard.append, 3)
    clock.now += FIRST_PAUSE_S
    assert breaker.retry(heard.append, 3)
    assert heard == [3] and (breaker.is_on_trial, breaker.is_open) == (True, False)
    breaker.take_news()
    breaker.confirm()
    assert (breaker.is_on_trial, breaker.is_open) == (False, False)
    (changed,) = breaker.take_news()
    assert isinstance(changed, BreakerChanged) and not changed.is_open
    breaker.confirm()
    assert breaker.take_news() == []


def test_each_pause_is_twice_as_long_up_to_a_bound(breaker: Breaker, clock: Clock) -> None:
    pauses = []
    for _ in range(12):
        trip(breaker)
        pauses.append(pause(breaker, clock))
    assert pauses[:4] == [FIRST_PAUSE_S * 2**number for number in range(4)]
    assert pauses[-2:] == [MAX_PAUSE_S, MAX_PAUSE_S]


def test_a_short_while_without_mistakes_does_not_make_up_for_many(
    breaker: Breaker, clock: Clock
) -> None:
    for _ in range(3):
        trip(breaker)
        pause(breaker, clock)
        breaker.confirm()
    clock.now += MAX_PAUSE_S / 2
    trip(breaker)
    assert pause(breaker, clock) == FIRST_PAUSE_S * 8
    breaker.confirm()
    clock.now += MAX_PAUSE_S + 1
    trip(breaker)
    assert pause(breaker, clock) == FIRST_PAUSE_S


def test_a_resync_that_fails_is_a_trial_that_fails(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += FIRST_PAUSE_S
    assert not breaker.retry(fail, ValueError("cannot"))
    cut_off = breaker.cut_off
    assert cut_off is not None and "cannot" in cut_off.reason
    assert pause(breaker, clock) == 2 * FIRST_PAUSE_S


def test_a_reason_is_short(breaker: Breaker) -> None:
    breaker.mistake("x" * 10_000)
    assert breaker.cut_off is not None
    assert len(breaker.cut_off.reason) == MAX_REASON_LEN
