"""The prefix cache that caches nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pegboard.interfaces.prefix_cache import Hit, Prefix, PrefixCache, PrefixCacheContext


class NoCache(PrefixCache):
    """Every lookup misses."""

    def __init__(self, context: PrefixCacheContext) -> None:
        self._miss = Hit(num_tokens=0, blocks=tuple(() for _ in context.groups))

    def match(self, prefix: Prefix, limit: int) -> Hit:
        return self._miss

    def use(self, prefix: Prefix, num_tokens: int) -> None:
        pass

    def publish(self, prefix: Prefix, blocks: Sequence[Sequence[int]]) -> Sequence[tuple[int, int]]:
        return ()

    def evict(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> Sequence[int]:
        return ()

    def clear(self) -> Sequence[tuple[int, int]]:
        return ()
