"""A prefix cache to compare with: a dictionary of all known beginnings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pegboard.interfaces.prefix_cache import Hit, Prefix, PrefixCache, PrefixCacheContext

Key = tuple[str, tuple[int, ...]]
"""Salt, and all tokens up to the end of a block."""


class DictCache(PrefixCache):
    """Names each block by all tokens up to its end. The longest beginnings are evicted first.

    Attributes:
        names: of each group, the blocks that have one.
        sizes: of each group, tokens of a block.
        stride: tokens after which blocks of all groups end.
    """

    def __init__(self, context: PrefixCacheContext) -> None:
        self.sizes = [group.block_size for group in context.groups]
        self.stride = math.lcm(*self.sizes)
        self.names: list[dict[Key, int]] = [{} for _ in self.sizes]

    def match(self, prefix: Prefix, limit: int) -> Hit:
        tokens = tuple(prefix.token_ids.tolist())
        most = min(limit, len(tokens)) // self.stride * self.stride
        for num_tokens in range(most, 0, -self.stride):
            blocks = [
                [
                    names.get((prefix.salt, tokens[:end]), 0)
                    for end in range(size, num_tokens + 1, size)
                ]
                for names, size in zip(self.names, self.sizes, strict=True)
            ]
            if all(all(group) for group in blocks):
                return Hit(num_tokens, tuple(blocks))
        return Hit(0, tuple(() for _ in self.sizes))

    def use(self, prefix: Prefix, num_tokens: int) -> None:
        pass

    def publish(self, prefix: Prefix, blocks: Sequence[Sequence[int]]) -> Sequence[tuple[int, int]]:
        tokens = tuple(prefix.token_ids.tolist())
        new = []
        for group, (names, size) in enumerate(zip(self.names, self.sizes, strict=True)):
            referenced = set(names.values())
            for entry, block in enumerate(blocks[group]):
                key = (prefix.salt, tokens[: (entry + 1) * size])
                if block and key not in names and block not in referenced:
                    names[key] = block
                    referenced.add(block)
                    new.append((group, block))
        return new

    def evict(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> Sequence[int]:
        names = self.names[group]
        keys = sorted(names, key=lambda key: -len(key[1]))
        victims = [key for key in keys if evictable(names[key])][:num_blocks]
        return [names.pop(key) for key in victims]

    def clear(self) -> Sequence[tuple[int, int]]:
        blocks = [
            (group, block) for group, names in enumerate(self.names) for block in names.values()
        ]
        for names in self.names:
            names.clear()
        return blocks
