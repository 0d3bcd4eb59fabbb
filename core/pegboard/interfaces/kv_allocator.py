"""`KVAllocator`: which blocks a sequence owns.

The allocator counts blocks and who refers to them, and knows no tokens. An owner's blocks are numbers,
for each KV group in the order of its tokens. Each reference to a block has an owner and is released once;
releasing again does nothing. Block 0 of each group is never handed out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.prefix_cache import PrefixCache

VERSION = 2

Owner = int | str
"""A sequence's id, or the name of another holder (a transfer)."""


@dataclass(frozen=True, slots=True)
class AllocatorContext:
    """The context of an allocator's factory.

    Attributes:
        groups: KV groups.
        num_blocks: blocks of each group, block 0 included.
        max_model_len: most tokens a sequence.
        max_chunk: most tokens that a step adds to a sequence; with the window it bounds the blocks that a
            sequence needs in a window group.
        cache: asked to evict when blocks run out; those that it alone refers to count as free.
    """

    groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]
    max_model_len: int
    max_chunk: int
    cache: PrefixCache


class Verdict(Enum):
    """When a demand can be met: `LATER` is once others have given blocks back."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a demand.

    Attributes:
        verdict: `NEVER` exactly when it exceeds an empty pool.
        missing: for each group, the blocks that are missing now.
        total: for each group, the blocks of an empty pool.
    """

    verdict: Verdict
    missing: tuple[int, ...]
    total: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Growth:
    """The changes that growing a sequence made.

    Attributes:
        new_blocks: for each group, (table entry, block) pairs.
        copies: for each group, (from, to) blocks to copy before anything is written: a shared block
            that the owner is about to write to was replaced by its own.
    """

    new_blocks: tuple[tuple[tuple[int, int], ...], ...]
    copies: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class KVLedger:
    """Counts of a group's blocks by use; block 0 is not counted. The parts sum to `total`.

    Attributes:
        total: blocks of the group.
        free: nobody's.
        held: referenced by sequences.
        cached: referenced by the prefix cache alone; evictable.
        pinned: referenced by pins alone.
        reserved: set aside and not yet handed out.
        deferred: released, and waiting for a step in flight.
    """

    total: int
    free: int
    held: int
    cached: int = 0
    pinned: int = 0
    reserved: int = 0
    deferred: int = 0


class KVAllocator(ABC):
    """Hands out blocks: what is asked for in all groups, or nothing."""

    @abstractmethod
    def probe(self, num_tokens: int, owner: Owner | None = None) -> Answer:
        """Whether a sequence could have slots for its first `num_tokens` tokens. Changes nothing.

        Args:
            num_tokens: slots in all, lookahead included.
            owner: the sequence, whose blocks count as there; None: a new one.
        """

    @abstractmethod
    def grow(self, owner: Owner, num_tokens: int, lookahead: Sequence[int] = ()) -> Growth | None:
        """Makes slots for the owner's first `num_tokens` tokens, and in each group `lookahead` more, for
        drafts; empty: none.

        What is there stays, so that calling it again changes nothing. The first call makes the owner.
        From slot `num_tokens` of the call before on, the owner will write: these blocks are its own alone.

        Returns:
            What changed; None, with nothing changed, when a group lacks blocks.
        """

    @abstractmethod
    def trim(self, owner: Owner, keep_from: int, keep_to: int) -> None:
        """Gives back blocks that hold no token in [keep_from, keep_to) of the owner.

        `keep_to` drops rejected drafts; `keep_from` drops what left the window, and acts on window
        groups alone: a group without a window keeps its beginning.
        """

    @abstractmethod
    def release(self, owner: Owner, after_step: int | None = None) -> None:
        """Gives back all of an owner's blocks. With `after_step`, they are free once that step is fenced.

        An unknown owner is ignored.
        """

    @abstractmethod
    def fence(self, step_id: int) -> None:
        """The step's result is committed: blocks that waited for it, or for an older one, are free."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """All changes inside take effect together; if the block raises, none of them does."""

    @abstractmethod
    def ledger(self) -> tuple[KVLedger, ...]:
        """An entry for each group."""


class SharedBlocks(ABC):
    """An allocator whose blocks can have several owners implements this beside `KVAllocator`.

    Manifest promise: `sharing`.
    """

    @abstractmethod
    def blocks(self, owner: Owner) -> tuple[Sequence[int], ...]:
        """For each group the owner's blocks in order; 0 where the window gave one back."""

    @abstractmethod
    def adopt(self, owner: Owner, blocks: Sequence[Sequence[int]]) -> None:
        """Makes an owner that begins with these blocks of each group, all full of known tokens.

        Raises:
            ValueError: the owner exists, or a block is free.
        """

    @abstractmethod
    def fork(self, owner: Owner, child: Owner, num_tokens: int) -> None:
        """Makes `child`, which shares the owner's first `num_tokens` tokens. A block that either
        writes to later is copied then (`Growth.copies`)."""

    @abstractmethod
    def retain(self, group: int, block: int) -> None:
        """The prefix cache refers to a block from now on: it is not free when its sequences are gone."""

    @abstractmethod
    def forget(self, group: int, block: int) -> None:
        """The prefix cache drops its reference."""


class PinnedBlocks(ABC):
    """An allocator that serves KV transfers implements this beside `KVAllocator`.

    Manifest promise: `pinning`.
    """

    @abstractmethod
    def pin(self, name: str, owner: Owner, deadline: float) -> tuple[Sequence[int], ...]:
        """Holds the owner's blocks under `name`, unchanged, until `unpin` or the deadline (seconds of
        the monotonic clock); returns those of each group."""

    @abstractmethod
    def unpin(self, name: str) -> None:
        """Drops a pin. An unknown one is ignored."""

    @abstractmethod
    def expire(self, now: float) -> tuple[str, ...]:
        """Drops pins past their deadline and returns their names."""
