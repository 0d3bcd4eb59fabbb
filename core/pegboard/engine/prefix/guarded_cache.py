"""A prefix cache behind a breaker: its answers are checked before engine and allocator get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from operator import index

from pegboard.engine.breaker import Breaker, PluginErred
from pegboard.engine.prefix.known_blocks import KnownBlocks
from pegboard.errors import INTERRUPTS
from pegboard.interfaces.prefix_cache import Hit, Prefix, PrefixCache

Blocks = Sequence[Sequence[int]]
"""A group's blocks, in order, for each group."""


class GuardedCache(PrefixCache):
    """Asks a cache and checks its answers; while the cache is cut off, every match is a miss.

    The table says which blocks the cache references: `Prefixes` notes those that a publication names.
    So each of them comes back even if the cache lies, by `evict`, or all at once by `clear`.

    Attributes:
        breaker: the cache's.
        known: the table of known blocks.
    """

    def __init__(self, cache: PrefixCache, known: KnownBlocks, name: str = "") -> None:
        """
        Args:
            name: the cache's, for messages; "": its class's.
        """
        self.breaker = Breaker("prefix_cache", name or type(cache).__name__)
        self.known = known
        self._cache = cache
        self._miss = Hit(num_tokens=0, blocks=((),) * known.num_groups)

    def match(self, prefix: Prefix, limit: int) -> Hit:
        breaker = self.breaker
        if breaker.is_open:
            return self._miss
        try:
            return self._checked_hit(breaker.call(self._cache.match, prefix, limit), limit)
        except PluginErred:
            return self._miss

    def use(self, prefix: Prefix, num_tokens: int) -> None:
        if not self.breaker.is_open:
            with suppress(PluginErred):
                self.breaker.call(self._cache.use, prefix, num_tokens)

    def publish(self, prefix: Prefix, blocks: Blocks) -> Sequence[tuple[int, int]]:
        breaker = self.breaker
        if breaker.is_open:
            return ()
        try:
            new = self._checked_names(breaker.call(self._cache.publish, prefix, blocks), blocks)
        except PluginErred:
            return ()
        breaker.confirm()
        return new

    def evict(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> Sequence[int]:
        breaker = self.breaker
        try:
            if breaker.is_open:
                raise PluginErred
            answer = breaker.call(self._cache.evict, group, num_blocks, evictable)
            evicted = self._checked_victims(answer, group, num_blocks, evictable)
        except PluginErred:
            evicted = self._victims(group, num_blocks, evictable)
        for block in evicted:
            self.known.uncache(group, block)
        return evicted

    def clear(self) -> Sequence[tuple[int, int]]:
        if not self.breaker.is_open:
            with suppress(PluginErred):
                self.breaker.call(self._cache.clear)
        return self.known.uncache_all()

    def retry(self) -> None:
        """Puts a cache that is cut off on trial when it is time; it begins anew, without a name."""
        self.breaker.retry(self._cache.clear)

    def _checked_hit(self, hit: Hit, limit: int) -> Hit:
        """The hit, as plain integers that nobody else holds. `Prefixes` checks whether its blocks hold the
        tokens."""
        try:
            num_tokens = index(hit.num_tokens)
            if num_tokens == 0:
                return self._miss
            # `len` refuses iterators, which may have no end.
            blocks = tuple(tuple(map(index, ids)) for ids in hit.blocks if len(ids) <= limit)
        except INTERRUPTS:
            raise
        except BaseException as error:
            raise self.breaker.wrong_answer("match", hit, "a Hit") from error
        if not 0 < num_tokens <= limit or len(blocks) != self.known.num_groups:
            raise self.breaker.wrong_answer("match", hit, f"a Hit of at most {limit} tokens")
        return Hit(num_tokens, blocks)

    def _checked_names(
        self, answer: Sequence[tuple[int, int]], blocks: Blocks
    ) -> list[tuple[int, int]]:
        """The references that a publication brought: to blocks that were published, each once."""
        try:
            new = [(index(group), index(block)) for group, block in answer] if len(answer) else []
        except INTERRUPTS:
            raise
        except BaseException as error:
            raise self.breaker.wrong_answer("publish", answer, "(group, block) pairs") from error
        if not new:
            return new
        # A publication names the last blocks as a rule.
        tails = [frozenset(ids[-len(new) :]) for ids in blocks]
        seen = set()
        for group, block in new:
            given = 0 <= group < len(blocks) and (block in tails[group] or block in blocks[group])
            if not block or not given:
                raise self.breaker.mistake(
                    f"publish references block {block} of group {group}, not one published"
                )
            if self.known.is_cached(group, block) or (group, block) in seen:
                raise self.breaker.mistake(
                    f"publish references block {block} of group {group} twice"
                )
            seen.add((group, block))
        return new

    def _checked_victims(
        self, answer: Sequence[int], group: int, num_blocks: int, evictable: Callable[[int], bool]
    ) -> Sequence[int]:
        try:
            evicted = [index(block) for block in answer] if len(answer) else []
        except INTERRUPTS:
            raise
        except BaseException as error:
            raise self.breaker.wrong_answer("evict", answer, "block numbers") from error
        if len(set(evicted)) < len(evicted) or len(evicted) > num_blocks:
            raise self.breaker.wrong_answer(
                "evict", evicted, f"{num_blocks} blocks at most, each once"
            )
        for block in evicted:
            if not (self.known.is_cached(group, block) and evictable(block)):
                raise self.breaker.mistake(
                    f"evict gives up block {block} of group {group}, which is not the cache's alone"
                )
        if not evicted and self._victims(group, 1, evictable):
            raise self.breaker.mistake(f"evict gives up nothing of group {group} where it could")
        return evicted

    def _victims(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> list[int]:
        """Blocks that only the cache references; the cache is not asked."""
        return list(islice(filter(evictable, self.known.cached(group)), num_blocks))
