"""Telling observers; one that raises is dropped."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pegboard.interfaces.observer import Event, Observer

_logger = logging.getLogger(__name__)


class Observers:
    """The observers that still listen."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    @property
    def listening(self) -> tuple[Observer, ...]:
        return tuple(self._observers)

    def tell(self, event: Event) -> None:
        """Passes an event on."""
        for observer in tuple(self._observers):
            try:
                observer.observe(event)
            except (Exception, SystemExit):  # it may not end the engine by sys.exit either
                _logger.exception("observer %s raised and is dropped", type(observer).__name__)
                self._observers.remove(observer)
                _close(observer)

    def close(self) -> None:
        """Closes all. Idempotent."""
        for observer in self._observers:
            _close(observer)
        self._observers.clear()


def _close(observer: Observer) -> None:
    try:
        observer.close()
    except (Exception, SystemExit):
        _logger.exception("closing observer %s raised", type(observer).__name__)
