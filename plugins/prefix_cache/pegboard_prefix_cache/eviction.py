"""Which block is given up first: a policy sees single nodes, and never the tree.

A policy ranks nodes; `candidates.py` asks it. A new one is a class here and a name in the options.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from pegboard_prefix_cache.node import Node

Rank = tuple[int, ...]


class Eviction(ABC):
    """Ranks the blocks of one KV group."""

    @abstractmethod
    def used(self, node: Node, priority: int) -> None:
        """A request of this priority (lower is more important) uses the node's block. For the blocks
        before it, from which it may `inherit`, this is not called."""

    @abstractmethod
    def inherit(self, parent: Node, child: Node) -> None:
        """The child's block is gone: each use of the child was one of the parent too."""

    @abstractmethod
    def rank(self, node: Node) -> Rank:
        """The lowest goes first. A node's rank only grows."""


class LeastRecentlyUsed(Eviction):
    """Evicts the block that was not used for longest."""

    def __init__(self) -> None:
        self._time = 0

    def used(self, node: Node, priority: int) -> None:
        self._time += 1
        node.last_use = self._time

    def inherit(self, parent: Node, child: Node) -> None:
        parent.last_use = max(parent.last_use, child.last_use)

    def rank(self, node: Node) -> Rank:
        return (node.last_use,)


class LeastImportant(LeastRecentlyUsed):
    """Evicts blocks that only the least important requests used; of those, the one not used for longest."""

    def used(self, node: Node, priority: int) -> None:
        super().used(node, priority)
        node.priority = min(node.priority, priority)

    def inherit(self, parent: Node, child: Node) -> None:
        super().inherit(parent, child)
        parent.priority = min(parent.priority, child.priority)

    def rank(self, node: Node) -> Rank:
        return (-node.priority, node.last_use)


EVICTIONS: dict[str, type[LeastRecentlyUsed]] = {
    "lru": LeastRecentlyUsed,
    "priority": LeastImportant,
}
"""Name in the options to policy."""
