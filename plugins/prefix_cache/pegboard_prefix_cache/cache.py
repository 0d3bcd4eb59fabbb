"""The prefix cache `trie`: a tree of known blocks for each KV group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

from pegboard.interfaces.prefix_cache import Hit, Prefix, PrefixCache, PrefixCacheContext
from pegboard_prefix_cache.eviction import EVICTIONS
from pegboard_prefix_cache.options import TrieOptions
from pegboard_prefix_cache.tree import HashBlock, Tree


class TrieCache(PrefixCache):
    """Blocks found by content, salt by salt.

    What a hit names was compared token by token: `hash_block` decides speed alone. Groups are apart:
    each gives up its blocks by itself, and a hit is what all of them still have.
    """

    def __init__(
        self,
        context: PrefixCacheContext,
        options: TrieOptions | None = None,
        hash_block: HashBlock = hash,
    ) -> None:
        self._context = context
        self._policy = EVICTIONS[(options or TrieOptions()).eviction]
        self._hash_block = hash_block
        self._stride = lcm(*(group.block_size for group in context.groups))
        self._miss = Hit(num_tokens=0, blocks=tuple(() for _ in context.groups))
        self._trees = self._plant()

    def match(self, prefix: Prefix, limit: int) -> Hit:
        tokens = prefix.token_ids[:limit].tobytes()
        known = [tree.blocks(prefix.salt, tokens) for tree in self._trees]
        num_tokens = self._longest(known)
        if num_tokens == 0:
            return self._miss
        blocks = []
        for tree, ids in zip(self._trees, known, strict=True):
            unseen = tree.num_unseen(num_tokens)
            blocks.append([0] * unseen + ids[unseen : num_tokens // tree.block_size])
        return Hit(num_tokens, tuple(blocks))

    def use(self, prefix: Prefix, num_tokens: int) -> None:
        tokens = prefix.token_ids[:num_tokens].tobytes()
        for tree in self._trees:
            tree.use(prefix.salt, tokens, prefix.priority)

    def publish(self, prefix: Prefix, blocks: Sequence[Sequence[int]]) -> Sequence[tuple[int, int]]:
        tokens = prefix.token_ids.tobytes()
        return [
            (group, block)
            for group, tree in enumerate(self._trees)
            for block in tree.name(prefix.salt, tokens, blocks[group], prefix.priority)
        ]

    def evict(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> Sequence[int]:
        return self._trees[group].evict(num_blocks, evictable)

    def clear(self) -> Sequence[tuple[int, int]]:
        blocks = [
            (group, block) for group, tree in enumerate(self._trees) for block in tree.named()
        ]
        self._trees = self._plant()
        return blocks

    def _plant(self) -> tuple[Tree, ...]:
        context = self._context
        return tuple(
            Tree(
                group.block_size,
                group.window,
                num_blocks,
                context.fingerprint,
                self._policy(),
                self._hash_block,
            )
            for group, num_blocks in zip(context.groups, context.num_blocks, strict=True)
        )

    def _longest(self, known: Sequence[Sequence[int]]) -> int:
        """Tokens of which each group has all the blocks that the tokens after them attend to."""
        num_tokens = min(
            len(ids) * tree.block_size for tree, ids in zip(self._trees, known, strict=True)
        )
        while True:
            num_tokens = num_tokens // self._stride * self._stride
            fitting = min(
                tree.fitting(ids, num_tokens) for tree, ids in zip(self._trees, known, strict=True)
            )
            if fitting == num_tokens:
                return num_tokens
            num_tokens = fitting
