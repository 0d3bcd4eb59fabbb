"""What observers are told of the prefix cache's names."""

from __future__ import annotations

from collections.abc import Callable

from pegboard.interfaces.kv_allocator import Growth
from pegboard.interfaces.observer import BlocksNamed

DigestOf = Callable[[int, int], bytes | None]
"""(group, block) -> the digest of all tokens up to the block's end; None: it holds nothing known."""


class PrefixNews:
    """Collects what changes between two events: each is the difference that a step made.

    A name goes when its block is handed out again: that is when a cache's eviction takes effect.

    Args:
        num_groups: KV groups.
        is_heard: whether there is an observer; if not, nothing is collected.
    """

    def __init__(self, num_groups: int, is_heard: bool) -> None:
        self._is_heard = is_heard
        self._blocks: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        # Ordered sets. A digest is in one of them at most.
        self._stored: dict[tuple[int, bytes], None] = {}
        self._evicted: dict[tuple[int, bytes], None] = {}
        self._is_cleared = False
        self._number = 0

    def stored(self, group: int, block: int, digest: bytes | None) -> None:
        """The cache names a block. Contents that have a name in another block keep the newer one."""
        if not self._is_heard or digest is None:
            return
        is_known = digest in self._blocks[group]
        self._blocks[group][digest] = block
        if is_known:
            return
        name = (group, digest)
        if name in self._evicted:
            del self._evicted[name]
        else:
            self._stored[name] = None

    def handed_out(self, growth: Growth, digest_of: DigestOf) -> None:
        """These blocks will be written to; `digest_of` still knows what they held."""
        if not self._is_heard:
            return
        for group, slots in enumerate(growth.slots):
            blocks = self._blocks[group]
            for _, block in slots:
                digest = digest_of(group, block)
                if digest is not None and blocks.get(digest) == block:
                    self._drop(group, digest)

    def cleared(self) -> None:
        """All names are forgotten."""
        if self._is_heard:
            for blocks in self._blocks:
                blocks.clear()
            self._stored.clear()
            self._evicted.clear()
            self._is_cleared = True

    def take(self) -> BlocksNamed | None:
        """What has changed since the last call; None: nothing."""
        if not (self._stored or self._evicted or self._is_cleared):
            return None
        self._number += 1
        event = BlocksNamed(
            self._number, tuple(self._stored), tuple(self._evicted), self._is_cleared
        )
        self._stored.clear()
        self._evicted.clear()
        self._is_cleared = False
        return event

    def _drop(self, group: int, digest: bytes) -> None:
        del self._blocks[group][digest]
        name = (group, digest)
        if name in self._stored:
            del self._stored[name]
        else:
            self._evicted[name] = None
