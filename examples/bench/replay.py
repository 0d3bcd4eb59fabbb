"""Replays a trace's blocks, without a model: what a prefix cache hits, and what it could have hit.

One request after the other: it looks its prompt up, gets blocks for what was not found, and leaves
prompt and answer in the cache. Beside a cache's hits stand two bounds:

- the *optimum* of a pool without end, in which every block seen before is a hit;
- *Belady's* of a pool of a given size: when blocks run out, the block goes whose next use is
  farthest. It knows the future, so no cache can do better.

Blocks are tokens with all that precede them: a block of use is one whose beginning is of use, so
what goes by Belady's rule is a leaf by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import takewhile
from math import inf

import numpy as np
from traces import TraceRequest

from pegboard.interfaces.kv_allocator import KVAllocator, SharedBlocks
from pegboard.interfaces.prefix_cache import Prefix, PrefixCache

MakeParts = Callable[[int], tuple[PrefixCache, KVAllocator]]
"""Number of blocks, block 0 not counted -> a cache, and an allocator that asks it to evict."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A request's blocks.

    Attributes:
        ids: names of those that it fills, in order; two requests' are equal where all tokens are.
        num_usable: how many a cache may serve: the prompt's last token is always computed.
        num_blocks: that it takes in all. The answer's last token is never computed and needs none.
    """

    ids: tuple[int, ...]
    num_usable: int
    num_blocks: int


def blocks_of(trace: Sequence[TraceRequest], block_size: int) -> list[Blocks]:
    """Each request's blocks."""
    names: dict[tuple[int, bytes], int] = {}
    requests = []
    for request in trace:
        tokens = _computed(request)
        ids: list[int] = []
        for start in range(0, len(tokens) - block_size + 1, block_size):
            key = (ids[-1] if ids else -1, tokens[start : start + block_size].tobytes())
            ids.append(names.setdefault(key, len(names)))
        num_usable = (len(request.prompt) - 1) // block_size
        requests.append(Blocks(tuple(ids), num_usable, -(-len(tokens) // block_size)))
    return requests


def num_distinct(requests: Sequence[Blocks]) -> int:
    """Blocks of all requests, equal ones counted once."""
    return len({name for request in requests for name in request.ids})


def pool_of(requests: Sequence[Blocks], fraction: float) -> int:
    """Blocks of a pool that holds this part of the distinct ones, and the largest request at least."""
    largest = max(request.num_blocks for request in requests)
    return max(largest, round(fraction * num_distinct(requests)))


def hit_rate(
    trace: Sequence[TraceRequest], hits: Sequence[int], priority: int | None = None
) -> float:
    """Part of the prompts' tokens that were hit; of requests of one priority, or of all."""
    chosen = [
        (len(request.prompt), hit)
        for request, hit in zip(trace, hits, strict=True)
        if priority in (None, request.priority)
    ]
    return sum(hit for _, hit in chosen) / max(1, sum(length for length, _ in chosen))


def optimum(requests: Sequence[Blocks], block_size: int) -> list[int]:
    """Tokens hit of each request in a pool without end."""
    seen: set[int] = set()
    hits = []
    for request in requests:
        hits.append(block_size * _num_known(request, seen))
        seen.update(request.ids)
    return hits


def belady(requests: Sequence[Blocks], num_blocks: int, block_size: int) -> list[int]:
    """Tokens hit of each request when what is evicted is what is used last, in time or never.

    Raises:
        ValueError: a request is larger than the pool.
    """
    pool = _Clairvoyant(requests, num_blocks)
    return [block_size * pool.serve(number) for number in range(len(requests))]


def replay(
    trace: Sequence[TraceRequest], make: MakeParts, num_blocks: int, block_size: int
) -> list[int]:
    """Tokens hit of each request by a real cache, with a real allocator.

    Raises:
        ValueError: a request is larger than the pool.
    """
    cache, allocator = make(num_blocks)
    assert isinstance(allocator, SharedBlocks)
    hits = []
    for owner, request in enumerate(trace):
        tokens = _computed(request)
        tokens.setflags(write=False)
        prefix = Prefix(tokens, "", request.priority)
        hit = cache.match(prefix, (len(request.prompt) - 1) // block_size * block_size)
        if hit.num_tokens:
            allocator.adopt(owner, hit.blocks)
            cache.use(prefix, hit.num_tokens)
        if allocator.grow(owner, len(tokens)) is None:
            raise ValueError(f"a request of {len(tokens)} tokens is larger than the pool")
        num_full = len(tokens) // block_size
        full = Prefix(tokens[: num_full * block_size], "", request.priority)
        for group, block in cache.publish(full, [allocator.blocks(owner)[0][:num_full]]):
            allocator.retain(group, block)
        allocator.release(owner)
        hits.append(hit.num_tokens)
    return hits


def _computed(request: TraceRequest) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.concatenate((request.prompt, request.answer[:-1]))


def _num_known(request: Blocks, known: set[int]) -> int:
    """How many of its blocks, from the first on, are known and may be served."""
    return sum(1 for _ in takewhile(known.__contains__, request.ids[: request.num_usable]))


class _Clairvoyant:
    """A cache that knows the requests to come."""

    def __init__(self, requests: Sequence[Blocks], num_blocks: int) -> None:
        self._requests = requests
        self._num_blocks = num_blocks
        self._cached: set[int] = set()
        self._uses: defaultdict[int, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            for name in request.ids[: request.num_usable]:
                self._uses[name].append(number)
        self._next_use: dict[int, float] = {}
        self._farthest: list[tuple[float, int, int]] = []

    def serve(self, number: int) -> int:
        """Serves a request, and returns how many of its blocks were hit."""
        request = self._requests[number]
        num_hit = _num_known(request, self._cached)
        self._make_room(request.num_blocks - num_hit, set(request.ids[:num_hit]))
        self._cached.update(request.ids)
        for depth, name in enumerate(request.ids):
            uses = self._uses[name]
            following = bisect_right(uses, number)
            next_use = uses[following] if following < len(uses) else inf
            self._next_use[name] = next_use
            # Of equals the deepest goes first: beginnings outlive what needs them.
            heappush(self._farthest, (-next_use, -depth, name))
        return num_hit

    def _make_room(self, num_blocks: int, held: set[int]) -> None:
        """Evicts until so many blocks are free; those held, whose next use is now, stay."""
        while self._num_blocks - len(self._cached) < num_blocks:
            if not self._farthest:
                raise ValueError(f"a request is larger than the pool of {self._num_blocks} blocks")
            negative_use, _, name = heappop(self._farthest)
            if -negative_use == self._next_use[name] and name not in held:
                self._cached.discard(name)
