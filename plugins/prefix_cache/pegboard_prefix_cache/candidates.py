"""The nodes whose blocks may be evicted, in a policy's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace

from pegboard_prefix_cache.eviction import Eviction, Rank
from pegboard_prefix_cache.node import Node


class Candidates:
    """A lazy queue: what has changed since a node was queued is looked at when its turn comes.

    Nobody says when a block that a sequence holds is let go. Such a block is in use, so it is put aside,
    as if used just now, and looked at again after as many evictions as there are blocks put aside, or
    when nothing else is left. So blocks that are held cost each eviction a constant, and a scan only
    where hardly anything can be evicted.
    """

    def __init__(self, policy: Eviction, may_go: Callable[[Node], bool]) -> None:
        self._policy = policy
        self._may_go = may_go
        self._heap: list[tuple[Rank, Node]] = []
        self._held: deque[Node] = deque()
        self._num_taken = 0

    def offer(self, node: Node) -> None:
        """The node's block may go from now on, as far as the tree is concerned."""
        if not node.is_queued:
            node.is_queued = True
            heappush(self._heap, (self._policy.rank(node), node))

    def take(self, evictable: Callable[[int], bool]) -> Node | None:
        """Removes the first whose block is evictable; None: there is none."""
        if self._held and self._num_taken >= len(self._held):
            self._offer_held()
        node = self._first(evictable) or self._first_let_go(evictable)
        if node is not None:
            node.is_queued = False
            self._num_taken += 1
        return node

    def held(self) -> tuple[Node, ...]:
        """The nodes put aside; all nodes, when `take` has found none."""
        return tuple(self._held)

    def _first(self, evictable: Callable[[int], bool]) -> Node | None:
        heap, policy = self._heap, self._policy
        while heap:
            queued, node = heap[0]
            rank = policy.rank(node)
            if not self._may_go(node):
                heappop(heap)
                node.is_queued = False
            elif rank != queued:
                heapreplace(heap, (rank, node))
            else:
                heappop(heap)
                if evictable(node.block):
                    return node
                policy.used(node, node.priority)
                self._held.append(node)
        return None

    def _first_let_go(self, evictable: Callable[[int], bool]) -> Node | None:
        """The first node that was let go; those put aside first are the likeliest."""
        for _ in range(len(self._held)):
            node = self._held.popleft()
            if not self._may_go(node):
                node.is_queued = False
            elif evictable(node.block):
                return node
            else:
                self._held.append(node)
        return None

    def _offer_held(self) -> None:
        self._num_taken = 0
        held, self._held = self._held, deque()
        for node in held:
            node.is_queued = False
            if self._may_go(node):
                self.offer(node)
