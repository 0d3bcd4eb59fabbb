"""Beginnings of sequences, between prefix cache and allocator: adopts known blocks, and names new ones."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Items
from math import lcm

from pegboard.engine.parts import EngineParts
from pegboard.engine.prefix.checksums import BlockChecksums
from pegboard.engine.prefix.digests import digests_of
from pegboard.engine.prefix.forks import Forks, num_unseen_blocks
from pegboard.engine.sequence import Sequence
from pegboard.interfaces.kv_allocator import Growth
from pegboard.interfaces.observer import ErrorHappened, Event
from pegboard.interfaces.prefix_cache import Hit, Prefix


class Prefixes:
    """Known beginnings of sequences. If the allocator cannot share blocks there are none; without a cache
    there are those of siblings only.

    A cache's hit is checked against the table of known blocks. One that does not hold counts as a miss,
    and as the cache's mistake.

    Attributes:
        forks: beginnings that running siblings have.
        miss: the hit of no tokens.
        stride: tokens that fill whole blocks in every group.
    """

    def __init__(self, parts: EngineParts, tell: Callable[[Event], None]) -> None:
        self.forks = Forks(parts.allocator, parts.groups)
        self.miss = Hit(num_tokens=0, blocks=((),) * len(parts.groups))
        self._groups = parts.groups
        self._block_sizes = tuple(group.block_size for group in parts.groups)
        self.stride = lcm(*self._block_sizes)
        self._blocks = self.forks.blocks
        is_used = parts.caches_prefixes and self._blocks is not None
        self._cache = parts.prefix_cache if is_used else None
        self._known = parts.prefix_cache.known
        self._checksums = (
            BlockChecksums(self._known, parts.executor, self._tell_of_change)
            if parts.verifies_blocks
            else None
        )
        self._tell = tell
        self._version = 0

    def match(self, seq: Sequence) -> Hit:
        """The cache's hit for a waiting sequence. The answer is kept until a name comes or goes.

        The last token is always computed: its logits are needed. So is a prompt whose logprobs were
        asked for.
        """
        if seq.match is None or seq.match[0] != self._version:
            seq.match = self._version, self._match(seq)
        return seq.match[1]

    def num_ready(self, seq: Sequence, preempted: Container[int]) -> int:
        """Tokens that a waiting sequence would begin with: a cache's, or a running sibling's. For
        `preempted`, see `Forks.parent`."""
        if self._parent(seq, preempted) is not None:
            return seq.num_prompt - 1
        return self.match(seq).num_tokens

    def reads(self, seq: Sequence) -> bool:
        """Whether the sequence may begin with a cache's blocks."""
        mode = seq.owner.request.prefix_cache
        return self._is_asked and mode != "off" and not seq.wants_prompt_logprobs

    def publishes(self, seq: Sequence) -> bool:
        """Whether the sequence's blocks will be named, as long as the cache is not cut off."""
        return self._is_asked and self._may_publish(seq)

    def begin_alike(self, one: Sequence, other: Sequence, num_tokens: int) -> bool:
        """Whether the first tokens of both, full blocks of them, and their salts are the same."""
        size = self._block_sizes[0]
        last = num_tokens // size - 1
        first, second = (digests_of(seq, size, last + 1) for seq in (one, other))
        return first[last] == second[last]

    def begin(self, seq: Sequence, preempted: Container[int]) -> tuple[Hit, bool]:
        """Makes the sequence an owner that begins with the blocks of a running sibling, or with those
        that a cache serves. Returns the hit, and whether it is a sibling's. After a miss the sequence
        is no owner yet."""
        parent = self._parent(seq, preempted)
        if parent is not None:
            return self.forks.fork(parent, seq), True
        for _ in range(2):
            hit = self.match(seq)
            adopted = self._adopt(seq, hit) if hit.num_tokens else hit
            if adopted is not None:
                return adopted, False
            # Blocks may have been given away since the cache was asked, in this very plan.
            self._version += 1
        self._note_mistake(f"a hit of {hit.num_tokens} tokens names blocks that were given away")
        return self.miss, False

    def use(self, seq: Sequence, num_tokens: int) -> None:
        """The sequence has really begun with these tokens of the cache."""
        assert self._cache is not None
        self._cache.use(_prefix(seq, seq.num_known), num_tokens)

    def handed_out(self, growth: Growth) -> None:
        """New blocks will be written to: their content is void."""
        if self._cache is not None:
            self._version += self._known.hand_out(growth)

    def publish(self, seq: Sequence) -> None:
        """Names the blocks that committed tokens have filled since the last time."""
        full = min(seq.num_computed, seq.num_known) // self.stride * self.stride
        if full <= seq.num_published:
            return
        if self._cache is not None and self._blocks is not None and self._may_publish(seq):
            tables = self._blocks.blocks(seq.seq_id)
            blocks: list[Items[int]] = []
            for group, size in enumerate(self._block_sizes):
                blocks.append(tables[group][: full // size])
                self._fill(seq, group, blocks[group], seq.num_published // size)
            named = self._cache.publish(_prefix(seq, full), blocks)
            self._version += len(named)
            for group, block in named:
                if not self._known.has(group, block):
                    # A plan that failed had handed it out, and so made it unknown.
                    self._fill(seq, group, blocks[group], 0)
                self._known.cache(group, block)
                self._blocks.retain(group, block)
        seq.num_published = full

    def settle(self) -> None:
        """Between two steps: takes back the blocks that a cut-off cache references, and tries it again when
        it is time."""
        if self._cache is not None and self._cache.breaker.is_open:
            self._forget_names()
            self._cache.retry()

    def reset(self, running: Iterable[Sequence]) -> None:
        """Forgets all names. Blocks of sequences that run now are never named either."""
        if self._cache is None:
            return
        self._forget_names()
        self._known.clear()
        for seq in running:
            seq.is_outdated = True

    def tell_news(self) -> None:
        """Tells observers which names have come and gone since the last time."""
        news = self._known.take_news()
        if news is not None:
            self._tell(news)

    @property
    def _is_asked(self) -> bool:
        """Whether there is a cache that is not cut off."""
        return self._cache is not None and not self._cache.breaker.is_open

    def _may_publish(self, seq: Sequence) -> bool:
        return seq.owner.request.prefix_cache == "on" and not seq.is_outdated

    def _parent(self, seq: Sequence, preempted: Container[int]) -> Sequence | None:
        """The running sibling that a waiting sequence would be forked from; None: there is none, or a
        cache serves as much."""
        if self.match(seq).num_tokens >= seq.num_prompt - 1:
            return None
        return self.forks.parent(seq, preempted)

    def _match(self, seq: Sequence) -> Hit:
        limit = (seq.num_known - 1) // self.stride * self.stride
        if self._cache is None or limit == 0 or not self.reads(seq):
            return self.miss
        hit = self._cache.match(_prefix(seq, seq.num_known), limit)
        if hit.num_tokens == 0:
            return self.miss
        if not self._holds(seq, hit, limit):
            self._note_mistake(
                f"a hit of {hit.num_tokens} tokens names blocks that do not hold them"
            )
            return self.miss
        return self.miss if self._checksums and self._checksums.distrusts(hit) else hit

    def _holds(self, seq: Sequence, hit: Hit, limit: int) -> bool:
        """Whether the hit's blocks hold the sequence's first tokens, at most `limit` of them."""
        if not 0 < hit.num_tokens <= limit or hit.num_tokens % self.stride:
            return False
        for index, (group, blocks) in enumerate(zip(self._groups, hit.blocks, strict=True)):
            if len(blocks) * group.block_size != hit.num_tokens:
                return False
            digests = digests_of(seq, group.block_size, len(blocks))
            num_unseen = num_unseen_blocks(group, hit.num_tokens)
            if not self._known.hold(index, blocks, digests, num_unseen):
                return False
        return True

    def _adopt(self, seq: Sequence, hit: Hit) -> Hit | None:
        """Makes the sequence an owner that begins with the hit's blocks; None where they have been
        given away.

        Blocks that lie before the window are left to others: a window group's owner has no more than
        its window and one chunk, or its demand could outgrow the pool.
        """
        assert self._blocks is not None
        if not self._holds(seq, hit, hit.num_tokens):
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

    def _fill(self, seq: Sequence, group: int, blocks: Items[int], first: int) -> None:
        """The sequence's tokens have filled its blocks of a group from the `first` on."""
        digests = digests_of(seq, self._block_sizes[group], len(blocks))
        new = self._known.fill(group, blocks[first:], digests[first : len(blocks)])
        if self._checksums:
            self._checksums.note(group, new)

    def _forget_names(self) -> None:
        assert self._cache is not None and self._blocks is not None
        self._version += 1
        for group, block in self._cache.clear():
            self._blocks.forget(group, block)

    def _note_mistake(self, message: str) -> None:
        assert self._cache is not None
        self._cache.breaker.mistake(message)

    def _tell_of_change(self, message: str) -> None:
        self._tell(ErrorHappened("BlockChanged", message))


def _prefix(seq: Sequence, num_tokens: int) -> Prefix:
    return Prefix(seq.token_ids[:num_tokens], seq.salt, seq.priority)
