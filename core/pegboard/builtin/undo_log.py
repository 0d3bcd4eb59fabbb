"""A log of changes, by which a transaction takes them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UndoLog:
    """Notes an inverse for each change, and runs them backwards when a transaction fails.

    Transactions nest: a failing inner one takes back its own changes alone. An inverse may be a change
    that notes its own inverse: while changes are taken back nothing is noted.
    """

    def __init__(self) -> None:
        self._inverses: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self._active = False

    def note(self, inverse: Callable[..., object], *args: object) -> None:
        """Remembers the inverse of a change just made; outside a transaction it is dropped."""
        if self._active:
            self._inverses.append((inverse, args))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        outer, mark = self._active, len(self._inverses)
        self._active = True
        try:
            yield
        except BaseException:
            self._active = False
            while len(self._inverses) > mark:
                inverse, args = self._inverses.pop()
                inverse(*args)
            raise
        finally:
            self._active = outer
            if not outer:
                self._inverses.clear()
