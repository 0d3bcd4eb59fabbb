"""Against a dictionary of all beginnings: an engine in small plays sequences over a pool that is too
small for them, and knows what each block holds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.prefix_cache import Hit, Prefix, PrefixCacheContext
from pegboard_prefix_cache.cache import TrieCache
from pegboard_prefix_cache.options import TrieOptions
from pegboard_prefix_cache.tree import HashBlock

Key = tuple[str, tuple[int, ...]]
"""Salt, and all tokens up to the end of a block."""

MAX_TOKENS = 16
NUM_SLOTS = 24
"""Of each group: one sequence always fits, three long ones do not."""


@dataclass(frozen=True)
class Kind:
    """A kind of model, of cache and of hash."""

    block_sizes: tuple[int, ...]
    windows: tuple[int | None, ...]
    eviction: str = "lru"
    hash_bits: int = 64


KINDS = [
    Kind((2,), (None,)),
    Kind((1,), (None,), "priority", hash_bits=8),
    Kind((1,), (3,)),
    Kind((2, 4), (None, None), hash_bits=0),
    Kind((2, 2), (None, 4), "priority"),
    Kind((1, 2, 4), (6, None, 3), hash_bits=8),
]


def hash_of_bits(num_bits: int) -> HashBlock:
    return lambda block: hash(block) % 2**num_bits


@dataclass
class Running:
    """A sequence: its text, and its blocks in each group; 0 where its window gave one back."""

    tokens: tuple[int, ...]
    salt: str
    priority: int
    tables: list[list[int]]


class SmallEngine:
    """Runs sequences, and compares each answer of the cache with what a dictionary says."""

    def __init__(self, kind: Kind) -> None:
        self.sizes, self.windows = kind.block_sizes, kind.windows
        self.stride = lcm(*self.sizes)
        totals = [NUM_SLOTS // size for size in self.sizes]
        groups = tuple(
            KVGroup((index,), 1, 8, size, window, "none", "float32")
            for index, (size, window) in enumerate(zip(self.sizes, self.windows, strict=True))
        )
        self.cache = TrieCache(
            PrefixCacheContext(groups, tuple(total + 1 for total in totals), "model"),
            TrieOptions.model_validate({"eviction": kind.eviction}),
            hash_of_bits(kind.hash_bits),
        )
        self.totals = totals
        self.free = [list(range(1, total + 1)) for total in totals]
        self.names: list[dict[Key, int]] = [{} for _ in self.sizes]
        self.owners: list[Counter[int]] = [Counter() for _ in self.sizes]
        self.running: list[Running] = []

    def begin(self, tokens: tuple[int, ...], salt: str, priority: int) -> None:
        """Starts a sequence with what is known, if the pool lets it, and computes the rest."""
        tokens = tokens[: len(tokens) // self.stride * self.stride]
        prefix = self._prefix(tokens, salt, priority)
        hit = self.cache.match(prefix, len(tokens))
        self._check_hit(hit, tokens, salt)
        seq = Running(tokens, salt, priority, [list(blocks) for blocks in hit.blocks])
        for group, table in enumerate(seq.tables):
            table[:] = [
                p if self._sees(group, hit.num_tokens, b) else 0 for b, p in enumerate(table)
            ]
            self.owners[group].update(block for block in table if block)
        if hit.num_tokens:
            self.cache.use(prefix, hit.num_tokens)
        self.running.append(seq)
        for group, table in enumerate(seq.tables):
            num_new = len(tokens) // self.sizes[group] - len(table)
            if not self._make_free(group, num_new):
                self.end(len(self.running) - 1)
                return
            new = [self.free[group].pop() for _ in range(num_new)]
            self.owners[group].update(new)
            table.extend(new)

    def publish(self, index: int) -> None:
        """Names a sequence's blocks; then its windows give back what no later token sees."""
        seq = self.running[index % len(self.running)]
        prefix = self._prefix(seq.tokens, seq.salt, seq.priority)
        expected = set()
        for group, table in enumerate(seq.tables):
            for entry, block in enumerate(table):
                key = (seq.salt, seq.tokens[: (entry + 1) * self.sizes[group]])
                if block and key not in self.names[group]:
                    self.names[group][key] = block
                    expected.add((group, block))
        new = self.cache.publish(prefix, [list(table) for table in seq.tables])
        assert len(new) == len(expected) and set(new) == expected
        for group, table in enumerate(seq.tables):
            for entry, block in enumerate(table):
                if block and not self._sees(group, len(seq.tokens), entry):
                    table[entry] = 0
                    self._let_go(group, block)

    def end(self, index: int) -> None:
        seq = self.running.pop(index % len(self.running))
        for group, table in enumerate(seq.tables):
            for block in filter(None, table):
                self._let_go(group, block)

    def clear(self) -> None:
        named = [(g, block) for g, names in enumerate(self.names) for block in names.values()]
        cleared = self.cache.clear()
        assert len(cleared) == len(named) and set(cleared) == set(named)
        for group, names in enumerate(self.names):
            blocks = list(names.values())
            names.clear()
            self.free[group].extend(block for block in blocks if not self.owners[group][block])

    def check_blocks(self) -> None:
        for group, total in enumerate(self.totals):
            used = {block for block, count in self.owners[group].items() if count}
            used |= set(self.names[group].values())
            assert used.isdisjoint(self.free[group])
            assert len(used) + len(self.free[group]) == total

    def _check_hit(self, hit: Hit, tokens: tuple[int, ...], salt: str) -> None:
        known = [
            [names.get((salt, tokens[:end]), 0) for end in range(size, len(tokens) + 1, size)]
            for names, size in zip(self.names, self.sizes, strict=True)
        ]
        best = next(n for n in range(len(tokens), -1, -self.stride) if self._suffices(known, n))
        assert hit.num_tokens == best
        for group, blocks in enumerate(hit.blocks):
            assert len(blocks) == best // self.sizes[group]
            for entry, block in enumerate(blocks):
                assert block == known[group][entry] or not self._sees(group, best, entry)

    def _suffices(self, known: list[list[int]], num_tokens: int) -> bool:
        return all(
            known[group][entry]
            for group, size in enumerate(self.sizes)
            for entry in range(num_tokens // size)
            if self._sees(group, num_tokens, entry)
        )

    def _sees(self, group: int, num_tokens: int, entry: int) -> bool:
        """Whether the token after the first `num_tokens` attends to the block."""
        window = self.windows[group]
        return window is None or (entry + 1) * self.sizes[group] > num_tokens - window + 1

    def _make_free(self, group: int, num_blocks: int) -> bool:
        missing = num_blocks - len(self.free[group])
        if missing <= 0:
            return True
        owners, names = self.owners[group], self.names[group]
        available = sum(not owners[block] for block in names.values())
        victims = list(self.cache.evict(group, missing, lambda block: not owners[block]))
        assert len(victims) == min(missing, available), "what nobody holds can be evicted"
        keys = {block: key for key, block in names.items()}
        for block in victims:
            assert not owners[block]
            if self.windows[group] is None:
                self._check_is_leaf(group, keys[block])
            del names[keys[block]]
        self.free[group].extend(victims)
        return missing <= len(victims)

    def _check_is_leaf(self, group: int, key: Key) -> None:
        """Whether nothing follows the block, unless some of that is in use. Past a gap, nothing does."""
        salt, tokens = key
        following = {
            other: block
            for (other_salt, other), block in self.names[group].items()
            if other_salt == salt and len(other) > len(tokens) and other[: len(tokens)] == tokens
        }
        if not any(self.owners[group][block] for block in following.values()):
            end = len(tokens) + self.sizes[group]
            assert all(len(other) != end for other in following), "not a leaf"

    def _let_go(self, group: int, block: int) -> None:
        self.owners[group][block] -= 1
        if not self.owners[group][block] and block not in self.names[group].values():
            self.free[group].append(block)

    @staticmethod
    def _prefix(tokens: tuple[int, ...], salt: str, priority: int) -> Prefix:
        token_ids = np.array(tokens, np.int32)
        token_ids.setflags(write=False)
        return Prefix(token_ids, salt, priority)


class SmallEngineMachine(RuleBasedStateMachine):
    """Hypothesis' choice of what happens."""

    @initialize(kind=st.sampled_from(KINDS))
    def start(self, kind: Kind) -> None:
        self.engine = SmallEngine(kind)

    @rule(
        tokens=st.lists(st.integers(0, 1), max_size=MAX_TOKENS).map(tuple),
        salt=st.sampled_from(["", "a"]),
        priority=st.integers(-1, 1),
    )
    def begin(self, tokens: tuple[int, ...], salt: str, priority: int) -> None:
        self.engine.begin(tokens, salt, priority)

    @rule(index=st.integers(0, 9))
    def publish(self, index: int) -> None:
        if self.engine.running:
            self.engine.publish(index)

    @rule(index=st.integers(0, 9))
    def end(self, index: int) -> None:
        if self.engine.running:
            self.engine.end(index)

    @rule()
    def clear(self) -> None:
        self.engine.clear()

    @invariant()
    def blocks_are_somewhere(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_blocks()


TestSmallEngine = SmallEngineMachine.TestCase
TestSmallEngine.settings = settings(deadline=None, stateful_step_count=40)


def play(kind: Kind, seed: int, num_operations: int) -> SmallEngine:
    """Operations at random. Texts are variations of a few, so that beginnings recur."""
    engine, rng = SmallEngine(kind), random.Random(seed)
    texts = _texts(rng)
    for _ in range(num_operations):
        choice = rng.random()
        if choice < 0.4 or not engine.running:
            engine.begin(next(texts), rng.choice(["", "", "a"]), rng.randint(-1, 1))
        elif choice < 0.7:
            engine.publish(rng.randrange(9))
        elif choice < 0.9997:
            engine.end(rng.randrange(9))
        else:
            engine.clear()
    engine.check_blocks()
    return engine


def _texts(rng: random.Random) -> Iterator[tuple[int, ...]]:
    known = [tuple(rng.choices(range(3), k=MAX_TOKENS)) for _ in range(5)]
    while True:
        start = rng.choice(known)[: rng.randrange(MAX_TOKENS + 1)]
        yield (start + tuple(rng.choices(range(3), k=MAX_TOKENS)))[: rng.randint(0, MAX_TOKENS)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_thousands_of_operations(kind: Kind) -> None:
    play(kind, seed=1, num_operations=3000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_millions_of_operations(kind: Kind, seed: int) -> None:
    """A hundred thousand each, of about two calls of the cache."""
    play(kind, seed=100 + seed, num_operations=100_000)
