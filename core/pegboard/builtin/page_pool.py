"""The pages of one KV group: who references each, and how many are where."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from pegboard.interfaces.kv_allocator import KVLedger


class Kind(IntEnum):
    """Kinds of references. A page with several kinds counts in the ledger as the first of them."""

    HELD = 0
    """A sequence's."""
    PINNED = 1
    DEFERRED = 2
    """A released sequence's, until a step in flight is over."""
    CACHED = 3


_FREE = len(Kind)


class PagePool:
    """Counts references by kind; a page without any is free. Page 0 is never handed out.

    Attributes:
        total: pages.
        shared: those that a sequence which holds them must not write to.
    """

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks - 1
        self.shared: set[int] = set()
        self._counts = tuple([0] * num_blocks for _ in Kind)
        self._num_where = [0] * len(Kind) + [self.total]
        # An ordered set: the page freed last is handed out first.
        self._free = dict.fromkeys(range(self.total, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Free, or free once the cache gives them up."""
        return len(self._free) + self._num_where[Kind.CACHED]

    def take(self) -> int:
        """Hands out a free page, held."""
        page, _ = self._free.popitem()
        self._counts[Kind.HELD][page] = 1
        self._num_where[_FREE] -= 1
        self._num_where[Kind.HELD] += 1
        return page

    def move(self, page: int, source: Kind | None, target: Kind | None) -> None:
        """Turns one reference of a page into another kind; None: there is, or remains, none."""
        before = self._where(page)
        if source is not None:
            assert self._counts[source][page] > 0, f"page {page} has no {source.name} reference"
            self._counts[source][page] -= 1
        if target is not None:
            self._counts[target][page] += 1
        held, pinned, _, cached = self._counts
        if held[page] + pinned[page] + cached[page] > 1:
            self.shared.add(page)
        else:
            self.shared.discard(page)
        after = self._where(page)
        if before == after:
            return
        self._num_where[before] -= 1
        self._num_where[after] += 1
        if before == _FREE:
            del self._free[page]
        elif after == _FREE:
            self._free[page] = None

    def move_all(self, pages: Iterable[int], source: Kind | None, target: Kind | None) -> None:
        for page in pages:
            self.move(page, source, target)

    def is_free(self, page: int) -> bool:
        return page in self._free

    def is_cached(self, page: int) -> bool:
        return self._counts[Kind.CACHED][page] > 0

    def is_evictable(self, page: int) -> bool:
        """Whether nobody but the cache references the page."""
        return self._where(page) == Kind.CACHED

    def ledger(self) -> KVLedger:
        held, pinned, deferred, cached, free = self._num_where
        return KVLedger(
            total=self.total, free=free, held=held, cached=cached, pinned=pinned, deferred=deferred
        )

    def _where(self, page: int) -> int:
        for kind, counts in enumerate(self._counts):
            if counts[page]:
                return kind
        return _FREE
