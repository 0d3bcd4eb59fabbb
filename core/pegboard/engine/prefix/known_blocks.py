"""The table of known blocks: the content of each, whether the prefix cache references it, and whether
observers know its name."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

import msgspec

from pegboard.interfaces.kv_allocator import Growth
from pegboard.interfaces.observer import BlocksNamed

Name = tuple[int, bytes]
"""Group and digest."""


class KnownBlock(msgspec.Struct, gc=False):
    """A block whose content is known.

    Attributes:
        digest: of all tokens up to its end, and the salt.
        is_cached: whether the prefix cache references it.
        checksum: of its KV when it was filled, a number a rank; (): the workers were not asked.
        has_changed: its KV was found changed: it is not served.
    """

    digest: bytes
    is_cached: bool = False
    checksum: tuple[int, ...] = ()
    has_changed: bool = False


class KnownBlocks:
    """The blocks that a forward has filled with committed tokens.

    A block becomes known when its tokens are committed, and unknown when it is handed out again. So a
    known block with the right digest holds the right KV, even if a cache claims otherwise.

    News for observers is the difference between two events. A name goes when its block is handed out
    again: that is when a cache's eviction takes effect.

    Args:
        num_groups: KV groups.
        is_heard: whether there is an observer; if not, no news is collected.
    """

    def __init__(self, num_groups: int, is_heard: bool = False) -> None:
        self._blocks: tuple[dict[int, KnownBlock], ...] = tuple({} for _ in range(num_groups))
        self._is_heard = is_heard
        self._told: dict[Name, int] = {}  # of several blocks with one name, the newest
        self._news: dict[Name, bool] = {}  # whether it was stored, or else evicted
        self._is_cleared = False
        self._num_events = 0

    @property
    def num_groups(self) -> int:
        return len(self._blocks)

    def has(self, group: int, block: int) -> bool:
        """Whether the block is known."""
        return block in self._blocks[group]

    def get(self, group: int, block: int) -> KnownBlock:
        """A known block."""
        return self._blocks[group][block]

    def fill(self, group: int, blocks: Items[int], digests: Items[bytes]) -> list[int]:
        """Committed tokens fill these blocks; 0: the window gave one back. Returns
        those that were unknown until now."""
        known, new = self._blocks[group], []
        for block, digest in zip(blocks, digests, strict=True):
            if block and block not in known:
                known[block] = KnownBlock(digest)
                new.append(block)
        return new

    def hand_out(self, growth: Growth) -> bool:
        """These blocks will be written to. Returns whether one of them was known."""
        was_known = False
        for group, new in enumerate(growth.new_blocks):
            known = self._blocks[group]
            for _, block in new:
                gone = known.pop(block, None)
                if gone is not None:
                    was_known = True
                    name = (group, gone.digest)
                    if self._told.get(name) == block:
                        del self._told[name]
                        self._tell(name, False)
        return was_known

    def hold(self, group: int, blocks: Items[int], digests: Items[bytes], num_unseen: int) -> bool:
        """Whether the blocks have these digests, of which there may be more. The first `num_unseen` blocks
        may be 0."""
        known = self._blocks[group]
        return all(
            (block == 0 and entry < num_unseen)
            or ((held := known.get(block)) is not None and held.digest == digest)
            for entry, (block, digest) in enumerate(zip(blocks, digests, strict=False))
        )

    def cached(self, group: int) -> Iterator[int]:
        """The blocks that the prefix cache references."""
        return (block for block, known in self._blocks[group].items() if known.is_cached)

    def is_cached(self, group: int, block: int) -> bool:
        """Whether the prefix cache references the block."""
        known = self._blocks[group].get(block)
        return known is not None and known.is_cached

    def cache(self, group: int, block: int) -> None:
        """The prefix cache references the block, and finds it by its content from now on."""
        known = self._blocks[group][block]
        known.is_cached = True
        if self._is_heard:
            name = (group, known.digest)
            if name not in self._told:
                self._tell(name, True)
            self._told[name] = block

    def uncache(self, group: int, block: int) -> None:
        """The prefix cache has given the block up."""
        self._blocks[group][block].is_cached = False

    def uncache_all(self) -> list[tuple[int, int]]:
        """The prefix cache has forgotten all. Returns (group, block) of each that it referenced."""
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
        """All blocks become unknown."""
        for known in self._blocks:
            known.clear()

    def take_news(self) -> BlocksNamed | None:
        """The names stored and evicted since the last call; None: there are none."""
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
        """Notes a change. A name that came and went between two events, or went and came, is no news."""
        if self._news.pop(name, None) is None:
            self._news[name] = is_stored
