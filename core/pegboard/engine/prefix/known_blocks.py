"""The table of known blocks: what each of them holds, whether the prefix cache references it, and what
observers were told of it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

import msgspec

from pegboard.interfaces.kv_allocator import Growth
from pegboard.interfaces.observer import BlocksNamed

Name = tuple[int, bytes]
"""Group and digest."""


class KnownBlock(msgspec.Struct, gc=False):
    """What a block holds.

    Attributes:
        digest: of all tokens up to its end, and the salt.
        is_cached: whether the prefix cache references it.
        checksum: of its KV when it was filled, a number a rank; (): nobody asked the workers.
        has_changed: its KV was found to be another: it is not served.
    """

    digest: bytes
    is_cached: bool = False
    checksum: tuple[int, ...] = ()
    has_changed: bool = False


class KnownBlocks:
    """A row for each block that a forward has filled with committed tokens.

    The row is made when the tokens are committed and dropped when the block is handed out again, so a
    block whose row has the right digest holds the right KV, whatever a cache may say.

    News for observers is the difference between two events. A name goes when its block is handed out
    again: that is when a cache's eviction takes effect.

    Args:
        num_groups: KV groups.
        is_heard: whether there is an observer; if not, no news is collected.
    """

    def __init__(self, num_groups: int, is_heard: bool = False) -> None:
        self._rows: tuple[dict[int, KnownBlock], ...] = tuple({} for _ in range(num_groups))
        self._is_heard = is_heard
        self._told: dict[Name, int] = {}  # of several blocks with one name, the newest
        self._news: dict[Name, bool] = {}  # whether it was stored, or else evicted
        self._is_cleared = False
        self._num_events = 0

    @property
    def num_groups(self) -> int:
        return len(self._rows)

    def has(self, group: int, block: int) -> bool:
        """Whether it is known what the block holds."""
        return block in self._rows[group]

    def row(self, group: int, block: int) -> KnownBlock:
        """What is known of a block that has a row."""
        return self._rows[group][block]

    def fill(self, group: int, blocks: Items[int], digests: Items[bytes]) -> list[int]:
        """Committed tokens fill these blocks; 0: the window gave one back. Those that have no row get
        one, and are returned."""
        rows, new = self._rows[group], []
        for block, digest in zip(blocks, digests, strict=True):
            if block and block not in rows:
                rows[block] = KnownBlock(digest)
                new.append(block)
        return new

    def hand_out(self, growth: Growth) -> bool:
        """These blocks will be written to. Returns whether one of them had a row."""
        was_known = False
        for group, new in enumerate(growth.new_blocks):
            rows = self._rows[group]
            for _, block in new:
                row = rows.pop(block, None)
                if row is not None:
                    was_known = True
                    name = (group, row.digest)
                    if self._told.get(name) == block:
                        del self._told[name]
                        self._tell(name, False)
        return was_known

    def hold(self, group: int, blocks: Items[int], digests: Items[bytes], num_unseen: int) -> bool:
        """Whether the blocks hold what the digests say, of which there may be more. The first
        `num_unseen` blocks may be 0."""
        rows = self._rows[group]
        return all(
            (block == 0 and entry < num_unseen)
            or ((row := rows.get(block)) is not None and row.digest == digest)
            for entry, (block, digest) in enumerate(zip(blocks, digests, strict=False))
        )

    def cached(self, group: int) -> Iterator[int]:
        """The blocks that the prefix cache references."""
        return (block for block, row in self._rows[group].items() if row.is_cached)

    def is_cached(self, group: int, block: int) -> bool:
        """Whether the prefix cache references the block."""
        row = self._rows[group].get(block)
        return row is not None and row.is_cached

    def cache(self, group: int, block: int) -> None:
        """The prefix cache references the block, and finds it by its content from now on."""
        row = self._rows[group][block]
        row.is_cached = True
        if self._is_heard:
            name = (group, row.digest)
            if name not in self._told:
                self._tell(name, True)
            self._told[name] = block

    def uncache(self, group: int, block: int) -> None:
        """The prefix cache has given the block up."""
        self._rows[group][block].is_cached = False

    def uncache_all(self) -> list[tuple[int, int]]:
        """The prefix cache has forgotten all; (group, block) of what it referenced."""
        cached = [
            (group, block) for group in range(self.num_groups) for block in self.cached(group)
        ]
        for group, block in cached:
            self.uncache(group, block)
        if self._told:
            self._told.clear()
            self._news.clear()
            self._is_cleared = True
        return cached

    def clear(self) -> None:
        """Nothing that was computed so far may be found again."""
        for rows in self._rows:
            rows.clear()

    def take_news(self) -> BlocksNamed | None:
        """What has changed since the last call; None: nothing."""
        if not self._news and not self._is_cleared:
            return None
        self._num_events += 1
        stored = tuple(name for name, is_stored in self._news.items() if is_stored)
        evicted = tuple(name for name, is_stored in self._news.items() if not is_stored)
        event = BlocksNamed(self._num_events, stored, evicted, self._is_cleared)
        self._news.clear()
        self._is_cleared = False
        return event

    def _tell(self, name: Name, is_stored: bool) -> None:
        """What came and went between two events is no news, nor what went and came."""
        if self._news.pop(name, None) is None:
            self._news[name] = is_stored
