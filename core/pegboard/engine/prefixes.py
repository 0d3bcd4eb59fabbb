"""Between prefix cache and allocator: which pages a sequence can begin with, and which to name."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import KVAllocator, SharedPages
from pegboard.interfaces.prefix_cache import Hit, Prefix, PrefixCache

if TYPE_CHECKING:
    from pegboard.engine.sequence import Sequence


class Prefixes:
    """Known beginnings of sequences. Without an allocator that shares pages there are none."""

    def __init__(
        self, cache: PrefixCache, allocator: KVAllocator, groups: tuple[KVGroup, ...]
    ) -> None:
        self._cache = cache
        self._pages = allocator if isinstance(allocator, SharedPages) else None
        self._block_sizes = tuple(group.block_size for group in groups)
        self._stride = lcm(*self._block_sizes)
        self._miss = Hit(num_tokens=0, pages=tuple(() for _ in groups))

    def match(self, seq: Sequence) -> Hit:
        """What a cache would serve of a waiting sequence.

        The last token is always computed: its logits are needed. So is a prompt whose logprobs were
        asked for.
        """
        limit = (seq.num_known - 1) // self._stride * self._stride
        if self._pages is None or limit == 0 or seq.wants_prompt_logprobs:
            return self._miss
        return self._cache.match(Prefix(seq.token_ids, seq.tenant), limit)

    def adopt(self, seq: Sequence, hit: Hit) -> None:
        """Makes the sequence an owner that begins with the hit's pages."""
        assert self._pages is not None
        self._pages.adopt(seq.seq_id, hit.pages)

    def publish(self, seq: Sequence) -> None:
        """Names the pages that committed tokens have filled since the last time."""
        full = min(seq.num_computed, seq.num_known) // self._stride * self._stride
        if self._pages is None or full <= seq.num_published:
            return
        pages = [
            table[: full // block_size]
            for table, block_size in zip(
                self._pages.pages(seq.seq_id), self._block_sizes, strict=True
            )
        ]
        prefix = Prefix(seq.token_ids[:full], seq.tenant)
        for group, page in self._cache.publish(prefix, pages):
            self._pages.retain(group, page)
        seq.num_published = full
