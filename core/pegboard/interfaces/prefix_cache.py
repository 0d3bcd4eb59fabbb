"""`PrefixCache`: which blocks hold known tokens.

The cache owns names (content to block) and knows no requests. It publishes only committed tokens,
after the forward that wrote them, and forgets a name before its block returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pegboard.interfaces.kv import KVGroup

VERSION = 1


@dataclass(frozen=True, slots=True)
class PrefixCacheContext:
    """The context of a cache's factory.

    Attributes:
        groups: KV groups.
        num_blocks: of each group.
        fingerprint: of everything that changes KV content and is the same for all requests: model,
            numerics, encoding.
    """

    groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens by which KV is looked up.

    Attributes:
        token_ids: int32 [num_tokens], read-only.
        salt: keeps tenants apart: KV is never shared between different salts.
        priority: of the request, lower is more important; a cache may keep its blocks longer.
    """

    token_ids: NDArray[np.int32]
    salt: str
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """Blocks that hold the first tokens of a prefix.

    Attributes:
        num_tokens: how many; a multiple of every group's block size. 0: a miss.
        blocks: for each group, in order.
    """

    num_tokens: int
    blocks: tuple[Sequence[int], ...]


class PrefixCache(ABC):
    """Finds blocks by content."""

    @abstractmethod
    def match(self, prefix: Prefix, limit: int) -> Hit:
        """The longest known beginning of at most `limit` tokens. No visible side effect."""

    @abstractmethod
    def use(self, prefix: Prefix, num_tokens: int) -> None:
        """A sequence begins with these first tokens of the prefix, as a match has said: they were of
        use, which the choice of what to evict may heed."""

    @abstractmethod
    def publish(self, prefix: Prefix, blocks: Sequence[Sequence[int]]) -> Sequence[tuple[int, int]]:
        """Names blocks, each full of committed tokens of the prefix; a group's blocks in order.

        Returns:
            The (group, block) pairs that the cache references from now on and did not before.
        """

    @abstractmethod
    def evict(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> Sequence[int]:
        """Forgets up to so many blocks that only the cache references, leaves first, and returns
        them. `evictable(block)` is the allocator's answer to whether nobody else references a block.
        Called from inside the allocator alone."""

    @abstractmethod
    def clear(self) -> Sequence[tuple[int, int]]:
        """Forgets all, and returns the (group, block) pairs that it referenced. From then on it is as
        good as new."""
