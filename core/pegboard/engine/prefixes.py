"""Between prefix cache and allocator: which pages a sequence can begin with, and which to name."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from math import lcm
from typing import TYPE_CHECKING

from pegboard.engine.page_contents import PageContents, num_unseen_blocks
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import Growth, SharedPages
from pegboard.interfaces.prefix_cache import Hit, Prefix, PrefixCache

if TYPE_CHECKING:
    from pegboard.engine.sequence import Sequence


class Prefixes:
    """Known beginnings of sequences. Without pages that can be shared there are none.

    What the cache says is checked against what the engine knows of each page; a hit that does not
    hold is a miss, and `on_mistake` is told.

    Attributes:
        miss: the hit of no tokens.
        stride: tokens that fill whole pages in every group.
    """

    def __init__(
        self,
        cache: PrefixCache,
        pages: SharedPages | None,
        groups: tuple[KVGroup, ...],
        on_mistake: Callable[[str], None],
    ) -> None:
        self._on_mistake = on_mistake
        self._contents = PageContents(groups)
        self._cache = cache
        self._pages = pages
        self._groups = groups
        self._block_sizes = tuple(group.block_size for group in groups)
        self.stride = lcm(*self._block_sizes)
        self.miss = Hit(num_tokens=0, pages=tuple(() for _ in groups))

    def match(self, seq: Sequence) -> Hit:
        """What a cache would serve of a waiting sequence.

        The last token is always computed: its logits are needed. So is a prompt whose logprobs were
        asked for.
        """
        limit = (seq.num_known - 1) // self.stride * self.stride
        if self._pages is None or limit == 0 or seq.wants_prompt_logprobs:
            return self.miss
        hit = self._cache.match(Prefix(seq.token_ids, seq.tenant), limit)
        if hit.num_tokens == 0 or self._contents.confirm(seq, hit, limit):
            return hit
        self._on_mistake(f"a hit of {hit.num_tokens} tokens names pages that do not hold them")
        return self.miss

    def adopt(self, seq: Sequence, hit: Hit) -> Hit:
        """Makes the sequence an owner that begins with the hit's pages; a miss where they have been
        given away.

        Pages that lie before the window are left to others: a window group's owner has no more than
        its window and one chunk, or its demand could outgrow the pool.
        """
        assert self._pages is not None
        pages = []
        for group, ids in zip(self._groups, hit.pages, strict=True):
            num_unseen = num_unseen_blocks(group, hit.num_tokens)
            pages.append((*[0] * num_unseen, *ids[num_unseen:]))
        try:
            self._pages.adopt(seq.seq_id, pages)
        except ValueError as error:
            self._on_mistake(str(error))
            return self.miss
        return Hit(hit.num_tokens, tuple(pages))

    def handed_out(self, growth: Growth) -> None:
        """New pages will be written to: what they held is void."""
        self._contents.drop(growth)

    def publish(self, seq: Sequence) -> None:
        """Names the pages that committed tokens have filled since the last time."""
        full = min(seq.num_computed, seq.num_known) // self.stride * self.stride
        if self._pages is None or full <= seq.num_published:
            return
        tables = self._pages.pages(seq.seq_id)
        pages: list[Items[int]] = []
        for group, block_size in enumerate(self._block_sizes):
            pages.append(tables[group][: full // block_size])
            self._contents.note(seq, group, pages[group], seq.num_published // block_size)
        prefix = Prefix(seq.token_ids[:full], seq.tenant)
        for group, page in self._cache.publish(prefix, pages):
            if page and page in pages[group]:
                self._pages.retain(group, page)
            else:
                self._on_mistake(f"it references page {page} of group {group}, not one published")
        seq.num_published = full
