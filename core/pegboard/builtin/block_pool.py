"""The blocks of one KV group: references to each, and counts by kind."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from pegboard.interfaces.kv_allocator import KVLedger


class Kind(IntEnum):
    """Kinds of references. A block with several kinds counts in the ledger as the first of them."""

    HELD = 0
    """A sequence's."""
    PINNED = 1
    DEFERRED = 2
    """A released sequence's, until a step in flight is over."""
    CACHED = 3


_FREE = len(Kind)


class BlockPool:
    """Counts references by kind; a block without any is free. Block 0 is never handed out.

    Attributes:
        total: blocks.
        shared: those that a sequence which holds them must not write to.
    """

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks - 1
        self.shared: set[int] = set()
        self._counts = tuple([0] * num_blocks for _ in Kind)
        self._num_where = [0] * len(Kind) + [self.total]
        # An ordered set: the block freed last is handed out first.
        self._free = dict.fromkeys(range(self.total, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Free, or free once the cache gives them up."""
        return len(self._free) + self._num_where[Kind.CACHED]

    def take(self) -> int:
        """Hands out a free block, held."""
        block, _ = self._free.popitem()
        self._counts[Kind.HELD][block] = 1
        self._num_where[_FREE] -= 1
        self._num_where[Kind.HELD] += 1
        return block

    def move(self, block: int, source: Kind | None, target: Kind | None) -> None:
        """Turns one reference of a block into another kind; None: there is, or remains, none."""
        before = self._where(block)
        if source is not None:
            assert self._counts[source][block] > 0, f"block {block} has no {source.name} reference"
            self._counts[source][block] -= 1
        if target is not None:
            self._counts[target][block] += 1
        held, pinned, _, cached = self._counts
        if held[block] + pinned[block] + cached[block] > 1:
            self.shared.add(block)
        else:
            self.shared.discard(block)
        after = self._where(block)
        if before == after:
            return
        self._num_where[before] -= 1
        self._num_where[after] += 1
        if before == _FREE:
            del self._free[block]
        elif after == _FREE:
            self._free[block] = None

    def move_all(self, blocks: Iterable[int], source: Kind | None, target: Kind | None) -> None:
        for block in blocks:
            self.move(block, source, target)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def is_cached(self, block: int) -> bool:
        return self._counts[Kind.CACHED][block] > 0

    def is_evictable(self, block: int) -> bool:
        """Whether nobody but the cache references the block."""
        return self._where(block) == Kind.CACHED

    def ledger(self) -> KVLedger:
        held, pinned, deferred, cached, free = self._num_where
        return KVLedger(
            total=self.total, free=free, held=held, cached=cached, pinned=pinned, deferred=deferred
        )

    def _where(self, block: int) -> int:
        for kind, counts in enumerate(self._counts):
            if counts[block]:
                return kind
        return _FREE
