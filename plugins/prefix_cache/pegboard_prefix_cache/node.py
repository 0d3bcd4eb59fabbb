"""One block of tokens in a tree."""

from __future__ import annotations

LEAST_IMPORTANT = 2**63 - 1
"""The priority of what no request has used."""


class Node:
    """A block of tokens that follows its parent's. There is one for each block: it is small.

    Attributes:
        parent: the block before; None: this is a root, which stands for no tokens.
        key: hash of the tokens and the parent's key.
        tokens: int32, as bytes.
        next: another node of the same key, which collides with this one.
        block: number of the KV block that holds them; 0: none does, and nodes below are reached through
            this one.
        num_children: nodes below.
        num_holding: of them, those with a block.
        is_queued: the queue of what may be evicted has it.
        last_use: a time, which eviction keeps.
        priority: of the most important request that used it, which eviction keeps.
    """

    __slots__ = (
        "block",
        "is_queued",
        "key",
        "last_use",
        "next",
        "num_children",
        "num_holding",
        "parent",
        "priority",
        "tokens",
    )

    def __init__(self, parent: Node | None, key: int, tokens: bytes) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.next: Node | None = None
        self.block = 0
        self.num_children = 0
        self.num_holding = 0
        self.is_queued = False
        self.last_use = 0
        self.priority = LEAST_IMPORTANT

    def __lt__(self, other: Node) -> bool:
        """Heaps ask it of nodes of equal rank, between which there is no order."""
        return False
