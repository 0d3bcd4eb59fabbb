"""Tells observers of events. One that errs is not told for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pegboard.engine.breaker import Breaker, PluginErred
from pegboard.errors import INTERRUPTS
from pegboard.interfaces.observer import Event, MetricsText, Observer

_logger = logging.getLogger(__name__)


class _Guarded:
    """One observer behind its breaker."""

    def __init__(self, observer: Observer, name: str) -> None:
        self.observer = observer
        self.breaker = Breaker("observer", name)
        self._num_missed = 0

    def tell(self, event: Event) -> None:
        if self.breaker.is_open and not self._is_back():
            self._num_missed += 1
            return
        try:
            self.breaker.call(self.observer.observe, event)
        except PluginErred:
            # No other observer may be there that logs.
            _logger.exception("observer %s is cut off", self.breaker.name)
        else:
            self.breaker.confirm()

    def render(self) -> str:
        if self.breaker.is_open or not isinstance(self.observer, MetricsText):
            return ""
        try:
            return self._rendered(self.observer)
        except PluginErred:
            return ""

    def close(self) -> None:
        try:
            self.observer.close()
        except INTERRUPTS:
            raise
        except BaseException:
            _logger.exception("closing observer %s raised", self.breaker.name)

    def _is_back(self) -> bool:
        if not self.breaker.retry(self.observer.resync, self._num_missed):
            return False
        self._num_missed = 0
        return True

    def _rendered(self, observer: MetricsText) -> str:
        text = self.breaker.call(observer.render)
        if not isinstance(text, str):
            raise self.breaker.mistake(f"render answered a {type(text).__name__}; allowed: a str")
        return text


class Observers:
    """All observers of an engine."""

    def __init__(self, observers: Sequence[Observer], name_of: Callable[[object], str]) -> None:
        self._all = [_Guarded(observer, name_of(observer)) for observer in observers]

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def breakers(self) -> tuple[Breaker, ...]:
        """The breaker of each observer."""
        return tuple(guarded.breaker for guarded in self._all)

    @property
    def listening(self) -> tuple[Observer, ...]:
        """The observers that are not cut off."""
        return tuple(guarded.observer for guarded in self._all if not guarded.breaker.is_open)

    def tell(self, event: Event) -> None:
        """Passes an event on."""
        for guarded in self._all:
            guarded.tell(event)

    def render(self) -> str:
        """The metrics of all observers that keep some and are not cut off."""
        return "".join(guarded.render() for guarded in self._all)

    def close(self) -> None:
        """Closes all. Idempotent."""
        closing, self._all = self._all, []
        for guarded in closing:
            guarded.close()
