"""A prefix cache for Pegboard: blocks found by content."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard import hookimpl

if TYPE_CHECKING:
    from pegboard.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
    from pegboard_prefix_cache.options import TrieOptions


@hookimpl
def pegboard_prefix_caches() -> dict[str, Callable[[PrefixCacheContext, TrieOptions], PrefixCache]]:
    return {"trie": _make_trie}


def _make_trie(context: PrefixCacheContext, options: TrieOptions) -> PrefixCache:
    from pegboard_prefix_cache.cache import TrieCache

    return TrieCache(context, options)
