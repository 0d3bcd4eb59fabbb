"""The known blocks of one KV group, as a tree: below each block, those that followed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pegboard_prefix_cache.candidates import Candidates
from pegboard_prefix_cache.eviction import Eviction
from pegboard_prefix_cache.node import Node

HashBlock = Callable[[tuple[int, bytes]], int]
"""Hashes a parent's key and a block's tokens. Tokens are compared too: the hash decides speed only."""

_TOKEN_BYTES = 4

_RootName = tuple[str, str]
"""Fingerprint and salt."""


class Tree:
    """Finds, names and evicts the blocks of a group.

    Attributes:
        block_size: tokens a block.
        window: of the group.
    """

    def __init__(
        self,
        block_size: int,
        window: int | None,
        num_blocks: int,
        fingerprint: str,
        policy: Eviction,
        hash_block: HashBlock,
    ) -> None:
        self.block_size = block_size
        self.window = window
        self._width = block_size * _TOKEN_BYTES
        self._fingerprint = fingerprint
        self._policy = policy
        self._hash_block = hash_block
        # A window's tokens do not need those before them: any block may go, not only leaves.
        self._may_go = _is_leaf if window is None else _has_block
        self._candidates = Candidates(policy, self._may_go)
        self._roots: dict[_RootName, Node] = {}
        self._nodes: dict[int, Node] = {}
        self._is_named = bytearray(num_blocks)

    def find(self, salt: str, tokens: bytes) -> list[Node]:
        """The known blocks at the beginning of these tokens, in order."""
        node = self._roots.get((self._fingerprint, salt))
        path: list[Node] = []
        if node is None:
            return path
        nodes, hash_block, width = self._nodes, self._hash_block, self._width
        for start in range(0, len(tokens) - width + 1, width):
            piece = tokens[start : start + width]
            child = nodes.get(hash_block((node.key, piece)))
            while child is not None and (child.parent is not node or child.tokens != piece):
                child = child.next
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def blocks(self, salt: str, tokens: bytes) -> list[int]:
        """The numbers of the known blocks; 0 where a window does without, which others cannot."""
        blocks = [node.block for node in self.find(salt, tokens)]
        if self.window is None and 0 in blocks:
            return blocks[: blocks.index(0)]
        return blocks

    def num_unseen(self, num_tokens: int) -> int:
        """Blocks at the beginning that no token after the first `num_tokens` attends to."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // self.block_size

    def fitting(self, blocks: Sequence[int], num_tokens: int) -> int:
        """`num_tokens`, where a hit of so many needs no block that is missing; else those before it."""
        if self.window is None:
            return num_tokens
        end = num_tokens // self.block_size
        for entry in range(end - 1, self.num_unseen(num_tokens) - 1, -1):
            if not blocks[entry]:
                return entry * self.block_size
        return num_tokens

    def use(self, salt: str, tokens: bytes, priority: int) -> None:
        """A request of this priority begins with these tokens."""
        path = self.find(salt, tokens)
        self._use(path, self._first_used(len(path)), priority)

    def name(self, salt: str, tokens: bytes, blocks: Sequence[int], priority: int) -> list[int]:
        """Names blocks by the tokens in them; returns those that were not named before."""
        num_blocks = _num_until_last_block(blocks)
        if not num_blocks:
            return []
        path = self.find(salt, tokens[: num_blocks * self._width])
        self._lengthen(path, salt, tokens, num_blocks)
        new = [
            entry
            for entry, node in enumerate(path)
            if not node.block and self._hold(node, blocks[entry])
        ]
        self._use(path, min([self._first_used(num_blocks), *new[:1]]), priority)
        for entry in new:
            self._offer(path[entry])
        self._prune(path[-1])
        return [blocks[entry] for entry in new]

    def evict(self, num_blocks: int, evictable: Callable[[int], bool]) -> list[int]:
        """Forgets the names of up to so many blocks, and returns them."""
        victims: list[int] = []
        while len(victims) < num_blocks:
            node = self._candidates.take(evictable)
            if node is None:
                return victims + self._evict_buried(num_blocks - len(victims), evictable)
            victims.append(self._forget(node))
        return victims

    def named(self) -> list[int]:
        """All blocks that have a name."""
        return [block for block, is_named in enumerate(self._is_named) if is_named]

    def _lengthen(self, path: list[Node], salt: str, tokens: bytes, num_blocks: int) -> None:
        """Adds the nodes that a path of so many blocks lacks."""
        node = path[-1] if path else self._root(salt)
        for start in range(len(path) * self._width, num_blocks * self._width, self._width):
            node = self._add(node, tokens[start : start + self._width])
            path.append(node)

    def _root(self, salt: str) -> Node:
        name = (self._fingerprint, salt)
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = Node(None, hash(name), salt.encode())
        return root

    def _add(self, parent: Node, tokens: bytes) -> Node:
        node = Node(parent, self._hash_block((parent.key, tokens)), tokens)
        node.next = self._nodes.get(node.key)
        self._nodes[node.key] = node
        parent.num_children += 1
        return node

    def _first_used(self, num_blocks: int) -> int:
        """The first block of a path that is used with its end; those before a leaf inherit from it."""
        if self.window is None:
            return max(0, num_blocks - 1)
        return self.num_unseen(num_blocks * self.block_size)

    def _use(self, path: Sequence[Node], first: int, priority: int) -> None:
        """The path's nodes from the `first` on are used, the last one least recently."""
        for node in reversed(path[first:]):
            self._policy.used(node, priority)

    def _hold(self, node: Node, block: int) -> bool:
        """Gives the node a block, unless that is nobody's or has a name."""
        if block == 0 or self._is_named[block]:
            return False
        self._is_named[block] = True
        node.block = block
        _parent(node).num_holding += 1
        return True

    def _forget(self, node: Node) -> int:
        """Takes the node's block from it, and returns the block."""
        block, parent = node.block, _parent(node)
        node.block = 0
        self._is_named[block] = False
        parent.num_holding -= 1
        if self.window is None:
            self._policy.inherit(parent, node)
            self._offer(parent)
        self._prune(node)
        return block

    def _offer(self, node: Node) -> None:
        if self._may_go(node):
            self._candidates.offer(node)

    def _evict_buried(self, num_blocks: int, evictable: Callable[[int], bool]) -> list[int]:
        """Evicts blocks that lie before ones in use.

        That a leaf is in use and what is before it is not happens when two sequences computed the
        same tokens: the first one's blocks have the names, and the second one goes on after it ends.
        """
        victims: list[int] = []
        seen: set[Node] = set()
        for leaf in self._candidates.held():
            node = leaf.parent
            while node is not None and node not in seen:
                seen.add(node)
                above = node.parent
                if node.block and evictable(node.block):
                    victims.append(self._forget(node))
                    if len(victims) == num_blocks:
                        return victims
                node = above
        return victims

    def _prune(self, node: Node) -> None:
        """Removes the node, and those above it, as far as they lead to no block."""
        while not node.block and not node.num_children:
            if node.parent is None:
                del self._roots[self._fingerprint, node.tokens.decode()]
                return
            self._unlink(node)
            node = node.parent
            node.num_children -= 1

    def _unlink(self, node: Node) -> None:
        first = self._nodes[node.key]
        if first is not node:
            while first.next is not node:
                assert first.next is not None, "a node is not where its key says"
                first = first.next
            first.next = node.next
        elif node.next is not None:
            self._nodes[node.key] = node.next
        else:
            del self._nodes[node.key]


def _has_block(node: Node) -> bool:
    return node.block != 0


def _is_leaf(node: Node) -> bool:
    """Whether the node has a block, and none below it has."""
    return node.block != 0 and node.num_holding == 0


def _parent(node: Node) -> Node:
    assert node.parent is not None, "a root has no block"
    return node.parent


def _num_until_last_block(blocks: Sequence[int]) -> int:
    num_blocks = len(blocks)
    while num_blocks and not blocks[num_blocks - 1]:
        num_blocks -= 1
    return num_blocks
