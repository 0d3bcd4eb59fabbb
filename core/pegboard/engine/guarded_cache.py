"""A prefix cache behind a breaker: engine and allocator hear only what can be true."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import index

from pegboard.engine.breaker import Breaker, PluginErred
from pegboard.errors import INTERRUPTS
from pegboard.interfaces.kv_allocator import SharedBlocks
from pegboard.interfaces.prefix_cache import Hit, Prefix, PrefixCache

Blocks = Sequence[Sequence[int]]
"""A group's blocks, in order, for each group."""


class GuardedCache(PrefixCache):
    """Asks a cache and checks its answers; while that is cut off, nothing is known.

    It keeps the blocks that the cache references, so that each of them comes back whatever the cache
    says: by `evict`, or all at once by `settle`.

    Attributes:
        breaker: the cache's.
    """

    def __init__(self, cache: PrefixCache, num_blocks: Sequence[int], name: str = "") -> None:
        """
        Args:
            num_blocks: of each group.
            name: the cache's, for messages; "": its class's.
        """
        self.breaker = Breaker("prefix_cache", name or type(cache).__name__)
        self._cache = cache
        # A byte a block, 1 where the cache references it: found quickly, and small beside the KV.
        self._held = tuple(bytearray(count) for count in num_blocks)
        self._miss = Hit(num_tokens=0, blocks=tuple(() for _ in num_blocks))

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
        for group, block in new:
            self._held[group][block] = 1
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
        held = self._held[group]
        for block in evicted:
            held[block] = 0
        return evicted

    def clear(self) -> Sequence[tuple[int, int]]:
        if not self.breaker.is_open:
            with suppress(PluginErred):
                self.breaker.call(self._cache.clear)
        held = [(group, block) for group in range(len(self._held)) for block in self._blocks(group)]
        for flags in self._held:
            flags[:] = bytes(len(flags))
        return held

    def settle(self, blocks: SharedBlocks) -> bool:
        """Gives back what a cache that is cut off holds, and puts it on trial when it is time. Not
        called inside a transaction. Whether names were forgotten."""
        if not self.breaker.is_open:
            return False
        held = self.clear()
        for group, block in held:
            blocks.forget(group, block)
        self.breaker.retry(self._cache.clear)
        return bool(held)

    def _checked_hit(self, hit: Hit, limit: int) -> Hit:
        """The hit, of plain integers that nobody else holds. Whether its blocks hold the tokens is for
        the engine to find."""
        try:
            num_tokens = index(hit.num_tokens)
            if num_tokens == 0:
                return self._miss
            # What has no length may have no end.
            blocks = tuple(tuple(map(index, ids)) for ids in hit.blocks if len(ids) <= limit)
        except INTERRUPTS:
            raise
        except BaseException as error:
            raise self.breaker.wrong_answer("match", hit, "a Hit") from error
        if not 0 < num_tokens <= limit or len(blocks) != len(self._held):
            raise self.breaker.wrong_answer("match", hit, f"a Hit of at most {limit} tokens")
        return Hit(num_tokens, blocks)

    def _checked_names(
        self, answer: Sequence[tuple[int, int]], blocks: Blocks
    ) -> list[tuple[int, int]]:
        """The references that a publication brought: to blocks that it was given, each for once."""
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
            if self._held[group][block] or (group, block) in seen:
                raise self.breaker.mistake(
                    f"publish references block {block} of group {group} twice"
                )
            seen.add((group, block))
        return new

    def _checked_victims(
        self,
        answer: Sequence[int],
        group: int,
        num_blocks: int,
        evictable: Callable[[int], bool],
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
        held = self._held[group]
        for block in evicted:
            if not (0 < block < len(held) and held[block] and evictable(block)):
                raise self.breaker.mistake(
                    f"evict gives up block {block} of group {group}, which is not the cache's alone"
                )
        if not evicted and self._victims(group, 1, evictable):
            raise self.breaker.mistake(f"evict gives up nothing of group {group} where it could")
        return evicted

    def _victims(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> list[int]:
        """Blocks that only the cache references, whatever it would give up."""
        victims: list[int] = []
        for block in self._blocks(group):
            if len(victims) == num_blocks:
                break
            if evictable(block):
                victims.append(block)
        return victims

    def _blocks(self, group: int) -> Iterator[int]:
        """Those that the cache references."""
        held = self._held[group]
        block = held.find(1)
        while block != -1:
            yield block
            block = held.find(1, block + 1)
