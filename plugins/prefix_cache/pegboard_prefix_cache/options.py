"""The options of the prefix cache `trie`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class TrieOptions(BaseModel):
    """`prefix_cache: {name: trie, options: {...}}`.

    Attributes:
        eviction: which blocks are given up first: `lru`, those not used for longest; `priority`, those
            of the least important requests, and among them as `lru`. Ends of texts before their
            beginnings, in both.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    eviction: Literal["lru", "priority"] = "lru"
