"""A prefix cache to compare with: a dictionary of all known beginnings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pegboard.interfaces.prefix_cache import Hit, Prefix, PrefixCache, PrefixCacheContext

Key = tuple[str, tuple[int, ...]]
"""Salt, and all tokens up to the end of a page."""


class DictCache(PrefixCache):
    """Names each page by all tokens up to its end. The longest beginnings are evicted first."""

    def __init__(self, context: PrefixCacheContext) -> None:
        self._sizes = [group.block_size for group in context.groups]
        self._stride = math.lcm(*self._sizes)
        self._names: list[dict[Key, int]] = [{} for _ in self._sizes]
        self._referenced: list[set[int]] = [set() for _ in self._sizes]

    def match(self, prefix: Prefix, limit: int) -> Hit:
        tokens = tuple(prefix.token_ids.tolist())
        most = min(limit, len(tokens)) // self._stride * self._stride
        for num_tokens in range(most, 0, -self._stride):
            pages = [
                [
                    names.get((prefix.salt, tokens[:end]), 0)
                    for end in range(size, num_tokens + 1, size)
                ]
                for names, size in zip(self._names, self._sizes, strict=True)
            ]
            if all(all(group) for group in pages):
                return Hit(num_tokens, tuple(pages))
        return Hit(0, tuple(() for _ in self._sizes))

    def use(self, prefix: Prefix, num_tokens: int) -> None:
        pass

    def publish(self, prefix: Prefix, pages: Sequence[Sequence[int]]) -> Sequence[tuple[int, int]]:
        tokens = tuple(prefix.token_ids.tolist())
        new = []
        for group, size in enumerate(self._sizes):
            names, referenced = self._names[group], self._referenced[group]
            for entry, page in enumerate(pages[group]):
                key = (prefix.salt, tokens[: (entry + 1) * size])
                if page and key not in names and page not in referenced:
                    names[key] = page
                    referenced.add(page)
                    new.append((group, page))
        return new

    def evict(self, group: int, num_pages: int, evictable: Callable[[int], bool]) -> Sequence[int]:
        names = self._names[group]
        keys = sorted(names, key=lambda key: -len(key[1]))
        victims = [names.pop(key) for key in [k for k in keys if evictable(names[k])][:num_pages]]
        self._referenced[group].difference_update(victims)
        return victims

    def clear(self) -> Sequence[tuple[int, int]]:
        pages = [(group, page) for group, held in enumerate(self._referenced) for page in held]
        for names, referenced in zip(self._names, self._referenced, strict=True):
            names.clear()
            referenced.clear()
        return pages
