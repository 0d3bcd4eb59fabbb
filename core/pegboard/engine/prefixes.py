"""Between prefix cache and allocator: which blocks a sequence can begin with, and which to name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from math import lcm
from typing import TYPE_CHECKING

from pegboard.engine.block_checksums import BlockChecksums
from pegboard.engine.block_contents import BlockContents, num_unseen_blocks
from pegboard.engine.forks import Forks
from pegboard.engine.guarded_cache import GuardedCache
from pegboard.engine.prefix_news import PrefixNews
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import Growth
from pegboard.interfaces.prefix_cache import Hit, Prefix

if TYPE_CHECKING:
    from pegboard.engine.sequence import Sequence


class Prefixes:
    """Known beginnings of sequences. Without blocks that can be shared there are none; without a cache
    (None) there are those of siblings alone.

    What the cache says is checked against what the engine knows of each block; a hit that does not
    hold is a miss, and `on_mistake` is told.

    Attributes:
        forks: beginnings that running siblings have.
        news: for observers.
        miss: the hit of no tokens.
        stride: tokens that fill whole blocks in every group.
    """

    def __init__(
        self,
        cache: GuardedCache | None,
        forks: Forks,
        groups: tuple[KVGroup, ...],
        on_mistake: Callable[[str], None],
        news: PrefixNews,
        checksums: BlockChecksums | None,
    ) -> None:
        self._on_mistake = on_mistake
        self._checksums = checksums
        self.news = news
        self._contents = BlockContents(groups)
        self._blocks = forks.blocks
        self._cache = None if forks.blocks is None else cache
        self._version = 0
        self.forks = forks
        self._groups = groups
        self._block_sizes = tuple(group.block_size for group in groups)
        self.stride = lcm(*self._block_sizes)
        self.miss = Hit(num_tokens=0, blocks=tuple(() for _ in groups))

    def match(self, seq: Sequence) -> Hit:
        """What a cache would serve of a waiting sequence. Asked again, it is the same answer, until a
        name has come or gone.

        The last token is always computed: its logits are needed. So is a prompt whose logprobs were
        asked for.
        """
        if seq.hit_version != self._version:
            seq.hit, seq.hit_version = self._match(seq), self._version
        return seq.hit

    def num_ready(self, seq: Sequence) -> int:
        """Tokens that a waiting sequence would begin with: a cache's, or a running sibling's."""
        num_tokens = self.match(seq).num_tokens
        if num_tokens < seq.num_prompt - 1 and self.forks.parent(seq) is not None:
            return seq.num_prompt - 1
        return num_tokens

    def reads(self, seq: Sequence) -> bool:
        """Whether the sequence may begin with what a cache serves."""
        mode = seq.owner.request.prefix_cache
        return self._is_asked and mode != "off" and not seq.wants_prompt_logprobs

    def publishes(self, seq: Sequence) -> bool:
        """Whether what the sequence computes becomes known to others as things are."""
        mode = seq.owner.request.prefix_cache
        return self._is_asked and mode == "on" and not seq.is_outdated

    @property
    def _is_asked(self) -> bool:
        """Whether there is a cache that is not cut off."""
        return self._cache is not None and not self._cache.breaker.is_open

    def begin_alike(self, one: Sequence, other: Sequence, num_tokens: int) -> bool:
        """Whether the first tokens of both, full blocks of them, and their salts are the same."""
        size = self._block_sizes[0]
        last = num_tokens // size - 1
        first, second = (seq.prefix_digests(size, last + 1) for seq in (one, other))
        return first[last] == second[last]

    def begin(self, seq: Sequence) -> Hit:
        """Makes the sequence an owner that begins with the blocks that a cache serves. What it begins
        with is returned: after a miss it is no owner yet."""
        for _ in range(2):
            hit = self.match(seq)
            adopted = self._adopt(seq, hit) if hit.num_tokens else hit
            if adopted is not None:
                return adopted
            # Blocks may have been given away since the cache was asked, in this very plan.
            self._version += 1
        self._on_mistake(f"a hit of {hit.num_tokens} tokens names blocks that were given away")
        return self.miss

    def use(self, seq: Sequence, num_tokens: int) -> None:
        """The sequence has really begun with these tokens of the cache."""
        assert self._cache is not None
        self._cache.use(self._prefix(seq, seq.num_known), num_tokens)

    def _prefix(self, seq: Sequence, num_tokens: int) -> Prefix:
        return Prefix(seq.token_ids[:num_tokens], seq.salt, seq.priority)

    def _match(self, seq: Sequence) -> Hit:
        limit = (seq.num_known - 1) // self.stride * self.stride
        if self._cache is None or limit == 0 or not self.reads(seq):
            return self.miss
        hit = self._cache.match(self._prefix(seq, seq.num_known), limit)
        if hit.num_tokens == 0 or self._contents.confirm(seq, hit, limit):
            return self.miss if self._checksums and self._checksums.distrusts(hit) else hit
        self._on_mistake(f"a hit of {hit.num_tokens} tokens names blocks that do not hold them")
        return self.miss

    def _adopt(self, seq: Sequence, hit: Hit) -> Hit | None:
        """Makes the sequence an owner that begins with the hit's blocks; None where they have been
        given away.

        Blocks that lie before the window are left to others: a window group's owner has no more than
        its window and one chunk, or its demand could outgrow the pool.
        """
        assert self._blocks is not None
        if not self._contents.confirm(seq, hit, hit.num_tokens):
            return None
        blocks = []
        for group, ids in zip(self._groups, hit.blocks, strict=True):
            num_unseen = num_unseen_blocks(group, hit.num_tokens)
            blocks.append((*[0] * num_unseen, *ids[num_unseen:]))
        if self._checksums and not self._checksums.confirm(blocks):
            self._version += 1
            return self.miss
        try:
            self._blocks.adopt(seq.seq_id, blocks)
        except ValueError:
            return None
        return Hit(hit.num_tokens, tuple(blocks))

    def handed_out(self, growth: Growth) -> None:
        """New blocks will be written to: what they held is void."""
        if self._cache is None:
            return
        self.news.handed_out(growth, self._contents.digest)
        self._version += self._contents.drop(growth)
        if self._checksums:
            self._checksums.drop(growth)

    def publish(self, seq: Sequence) -> None:
        """Names the blocks that committed tokens have filled since the last time."""
        if self._cache is None or self._blocks is None:
            return
        full = min(seq.num_computed, seq.num_known) // self.stride * self.stride
        if full <= seq.num_published:
            return
        if seq.owner.request.prefix_cache != "on":
            seq.num_published = full
            return
        tables = self._blocks.blocks(seq.seq_id)
        blocks: list[Items[int]] = []
        for group, block_size in enumerate(self._block_sizes):
            blocks.append(tables[group][: full // block_size])
            first = seq.num_published // block_size
            self._contents.note(seq, group, blocks[group], first)
            if self._checksums:
                self._checksums.note(group, blocks[group][first:])
        named = self._cache.publish(self._prefix(seq, full), blocks)
        self._version += len(named)
        published = [set(ids) for ids in blocks] if named else []
        for group, block in named:
            if block and block in published[group]:
                self._blocks.retain(group, block)
                self.news.stored(group, block, self._contents.digest(group, block))
            else:
                self._on_mistake(f"it references block {block} of group {group}, not one published")
        seq.num_published = full

    def settle(self) -> None:
        """Between two steps, what a cache that is cut off holds comes back."""
        if (
            self._cache is not None
            and self._blocks is not None
            and self._cache.settle(self._blocks)
        ):
            self._version += 1
            self.news.cleared()

    def reset(self, running: Iterable[Sequence]) -> None:
        """Forgets all names. What running sequences have computed so far is never named either."""
        if self._cache is None or self._blocks is None:
            return
        self._version += 1
        for group, block in self._cache.clear():
            self._blocks.forget(group, block)
        self._contents.clear()
        if self._checksums:
            self._checksums.clear()
        for seq in running:
            seq.num_published = seq.max_known
        self.news.cleared()
