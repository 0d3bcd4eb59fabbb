"""A breaker cuts off a plugin that errs, and tries it again after a pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import ParamSpec, TypeVar

import msgspec

from pegboard.errors import INTERRUPTS, MAX_REASON_LEN, reason_of
from pegboard.interfaces.observer import BreakerChanged, ErrorHappened, Event

MAX_CALL_S = 5.0
"""Most seconds of one call: so many that a busy machine alone does not cut a plugin off."""

FIRST_PAUSE_S = 1.0
"""Seconds for which a plugin is cut off the first time. Each later time it is twice as long."""

MAX_PAUSE_S = 300.0
"""Most seconds of a pause; after as many seconds without a mistake the next pause is the first again."""

P = ParamSpec("P")
T = TypeVar("T")


class CutOff(msgspec.Struct, frozen=True):
    """A plugin that the engine does without for now.

    Attributes:
        part: its interface.
        name: its name in the config.
        reason: its mistake.
    """

    part: str
    name: str
    reason: str


class PluginErred(Exception):
    """The call brought no usable answer; the plugin is cut off."""


class _State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


class Breaker:
    """Stands between the engine and one plugin. Closed, it lets calls through; open, the engine does
    without the plugin.

    After a pause `retry` brings the plugin back on trial: the next mistake opens the breaker for twice
    as long, and `confirm` closes it.

    Attributes:
        part, name: of the plugin; see `CutOff`.
        seconds: spent in its calls so far.
    """

    def __init__(self, part: str, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: seconds. It may stand still while others work on the plugin's behalf.
        """
        self.part = part
        self.name = name
        self.seconds = 0.0
        self._clock = clock
        self._state = _State.CLOSED
        self._reason = ""
        self._pause_s = 0.0
        self._until = 0.0
        self._closed_at = 0.0
        self._news: list[Event] = []

    @property
    def is_open(self) -> bool:
        return self._state is _State.OPEN

    @property
    def is_on_trial(self) -> bool:
        return self._state is _State.TRIAL

    @property
    def cut_off(self) -> CutOff | None:
        """The reason for which the plugin is cut off; None: it is not."""
        return CutOff(self.part, self.name, self._reason) if self.is_open else None

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The plugin's answer.

        Raises:
            PluginErred: it raised, or took too long.
        """
        clock = self._clock
        started = clock()
        try:
            answer = function(*args, **kwargs)
        except INTERRUPTS:
            raise
        except BaseException as error:
            self.seconds += clock() - started
            self._open(type(error).__name__, reason_of(error))
            raise PluginErred from error
        taken = clock() - started
        self.seconds += taken
        if taken > MAX_CALL_S:
            name = getattr(function, "__name__", "a call")
            raise self.mistake(f"{name} took {taken:.1f} s; allowed: {MAX_CALL_S:g}")
        return answer

    def mistake(self, message: str) -> PluginErred:
        """The plugin broke its contract: cuts it off, and returns the error to raise."""
        if not self.is_open:
            kind = "".join(word.capitalize() for word in self.part.split("_")) + "Mistake"
            self._open(kind, message)
        return PluginErred(message)

    def wrong_answer(self, method: str, answer: object, allowed: str) -> PluginErred:
        """An answer cannot be used: see `mistake`."""
        kind = type(answer).__name__
        return self.mistake(f"{method} answered {kind} {_shown(answer)}; allowed: {allowed}")

    def confirm(self) -> None:
        """A call has brought a good answer: a trial ends well."""
        if self._state is _State.TRIAL:
            self._state = _State.CLOSED
            self._closed_at = self._clock()
            self._news.append(BreakerChanged(self.part, self.name, False, self._reason))

    def retry(self, resync: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Puts a cut-off plugin on trial once its pause is over, and calls `resync` of it. Returns
        whether the plugin may be called now."""
        if not self.is_open or self._clock() < self._until:
            return not self.is_open
        self._state = _State.TRIAL
        try:
            self.call(resync, *args, **kwargs)
        except PluginErred:
            return False
        return True

    def take_news(self) -> list[Event]:
        """Events that observers have not been told yet."""
        if not self._news:
            return []
        news, self._news = self._news, []
        return news

    def _open(self, kind: str, reason: str) -> None:
        now = self._clock()
        did_well = self._state is _State.CLOSED and now - self._closed_at > MAX_PAUSE_S
        if did_well or not self._pause_s:
            self._pause_s = FIRST_PAUSE_S
        else:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._until = now + self._pause_s
        self._state = _State.OPEN
        self._reason = reason[:MAX_REASON_LEN]
        line = f"{self.part} {self.name!r} is cut off for {self._pause_s:g} s: {self._reason}"
        self._news.append(ErrorHappened(kind, line))
        self._news.append(BreakerChanged(self.part, self.name, True, self._reason))


def _shown(answer: object) -> str:
    try:
        return repr(answer)[:80]
    except INTERRUPTS:
        raise
    except BaseException:
        return "that cannot be shown"
