"""The paged allocator against sets: windows, several groups, rollback, what may be written to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pegboard.builtin.no_cache import NoCache
from pegboard.builtin.paged_allocator import PagedAllocator
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import AllocatorContext, Growth, Verdict
from pegboard.interfaces.prefix_cache import PrefixCacheContext

MAX_CHUNK = 6
WINDOW = 5


class Names(NoCache):
    """A cache of blocks that a test names by hand."""

    def __init__(self, context: PrefixCacheContext) -> None:
        super().__init__(context)
        self.names: list[tuple[int, int]] = []

    def evict(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> Sequence[int]:
        blocks = [block for g, block in self.names if g == group and evictable(block)][:num_blocks]
        self.names = [name for name in self.names if name[0] != group or name[1] not in blocks]
        return blocks


def _groups(*shapes: tuple[int, int | None]) -> tuple[KVGroup, ...]:
    return tuple(
        KVGroup((index,), 1, 8, size, window, "none", "float32")
        for index, (size, window) in enumerate(shapes)
    )


def _pool(*num_blocks: int, shapes: Sequence[tuple[int, int | None]] = ((4, None),)) -> Any:
    groups = _groups(*shapes)
    cache = Names(PrefixCacheContext(groups, num_blocks, ""))
    return PagedAllocator(AllocatorContext(groups, num_blocks, 400, MAX_CHUNK, cache)), cache


class PagedMachine(RuleBasedStateMachine):
    """Sequences of a group without and one with a window, driven as an engine drives them.

    The model is one set of references a block: owners, pins, waiting steps, the cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self.next_owner = 0
        self.step = 0

    @initialize(
        sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
        counts=st.tuples(st.integers(8, 30), st.integers(8, 20)),
    )
    def begin(self, sizes: tuple[int, int], counts: tuple[int, int]) -> None:
        self.shapes = ((sizes[0], None), (sizes[1], WINDOW))
        self.counts = counts
        self.pool, self.cache = _pool(*counts, shapes=self.shapes)
        self.tables: dict[int, list[list[int]]] = {}
        self.lengths: dict[int, int] = {}
        self.waiting: list[tuple[int, list[set[int]]]] = []
        self.pins: dict[str, list[set[int]]] = {}

    def _references(self, group: int) -> Counter[int]:
        """References that keep a block from being handed out."""
        blocks: Counter[int] = Counter()
        for tables in self.tables.values():
            blocks.update(block for block in tables[group] if block)
        for _, waiting in self.waiting:
            blocks.update(waiting[group])
        for pinned in self.pins.values():
            blocks.update(pinned[group])
        return blocks

    def _grow(self, owner: int, num_tokens: int, lookahead: int) -> Growth | None:
        before = [self._references(group) for group in range(2)]
        ledger = self.pool.ledger()
        growth: Growth | None = self.pool.grow(owner, num_tokens, (lookahead, lookahead))
        if growth is None:
            after = self.pool.ledger()
            assert [entry.held for entry in after] == [entry.held for entry in ledger]
            assert self.pool.probe(num_tokens + lookahead, owner).verdict is not Verdict.NOW
            return None
        tables = self.tables.setdefault(owner, [[], []])
        for group, (size, _) in enumerate(self.shapes):
            written = self.lengths.get(owner, 0) // size
            for entry, block in growth.new_blocks[group]:
                assert block and not before[group][block], "the block is somebody's"
                tables[group][entry : entry + 1] = [block]
            assert len(tables[group]) * size >= num_tokens + min(lookahead, 1)
            for block in tables[group][written : -(-num_tokens // size)]:
                shared = self._references(group)[block] - sum(
                    block in waiting[group] for _, waiting in self.waiting
                )
                assert shared == 1 and (group, block) not in self.cache.names
        self.lengths[owner] = num_tokens
        return growth

    @rule(num_tokens=st.integers(1, MAX_CHUNK), lookahead=st.integers(0, 2))
    def arrive(self, num_tokens: int, lookahead: int) -> None:
        self.next_owner += 1
        lookahead = min(lookahead, MAX_CHUNK - num_tokens)
        self._grow(self.next_owner, num_tokens, lookahead)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), chunk=st.integers(1, MAX_CHUNK), drafts=st.integers(0, 3))
    def compute(self, data: st.DataObject, chunk: int, drafts: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.lengths)))
        drafts = min(drafts, MAX_CHUNK - chunk)
        length = self.lengths[owner] + chunk
        if self._grow(owner, length, drafts) is None:
            return
        accepted = data.draw(st.integers(0, drafts))
        keep_from, keep_to = max(0, length + accepted - WINDOW + 1), length + accepted
        self.pool.trim(owner, keep_from, keep_to)
        for group, (size, window) in enumerate(self.shapes):
            table = self.tables[owner][group]
            del table[-(-keep_to // size) :]
            if window is not None:
                for entry in range(min(keep_from // size, len(table))):
                    table[entry] = 0

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), back=st.integers(0, 3))
    def fork(self, data: st.DataObject, back: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.lengths)))
        num_tokens = max(1, self.lengths[owner] - back)
        self.next_owner += 1
        self.pool.fork(owner, self.next_owner, num_tokens)
        self.tables[self.next_owner] = [
            table[: -(-num_tokens // size)]
            for table, (size, _) in zip(self.tables[owner], self.shapes, strict=True)
        ]
        self.lengths[self.next_owner] = num_tokens

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.lengths)))
        for group, (size, _) in enumerate(self.shapes):
            for block in self.tables[owner][group][: self.lengths[owner] // size]:
                if block and (group, block) not in self.cache.names:
                    self.pool.retain(group, block)
                    self.cache.names.append((group, block))

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), name=st.sampled_from("ab"))
    def pin(self, data: st.DataObject, name: str) -> None:
        self.pool.unpin(name)
        owner = data.draw(st.sampled_from(sorted(self.lengths)))
        blocks = self.pool.pin(name, owner, 1.0)
        self.pins[name] = [{block for block in group if block} for group in blocks]

    @rule()
    def expire(self) -> None:
        assert set(self.pool.expire(2.0)) == set(self.pins)
        self.pins.clear()

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), later=st.sampled_from([None, 1, 2]))
    def release(self, data: st.DataObject, later: int | None) -> None:
        owner = data.draw(st.sampled_from(sorted(self.lengths)))
        after_step = None if later is None else self.step + later
        self.pool.release(owner, after_step)
        tables = self.tables.pop(owner)
        del self.lengths[owner]
        if after_step is not None:
            self.waiting.append((after_step, [{p for p in table if p} for table in tables]))

    @rule()
    def fence(self) -> None:
        self.step += 1
        self.pool.fence(self.step)
        self.waiting = [entry for entry in self.waiting if entry[0] > self.step]

    @rule(data=st.data())
    def fail_half_way(self, data: st.DataObject) -> None:
        """After a transaction that fails, tables and blocks are as before."""
        with pytest.raises(InterruptedError), self.pool.transaction():
            self.pool.grow(-1, MAX_CHUNK)
            for owner in sorted(self.lengths):
                change = data.draw(st.sampled_from(["grow", "trim", "release", "defer", "fork"]))
                length = self.lengths[owner]
                if change == "grow":
                    self.pool.grow(owner, length + 2, (2, 2))
                elif change == "trim":
                    self.pool.trim(owner, length // 2, max(1, length - 2))
                elif change == "fork":
                    self.pool.fork(owner, -owner - 1, length)
                else:
                    self.pool.release(owner, self.step + 1 if change == "defer" else None)
            self.pool.fence(self.step + 1)
            raise InterruptedError

    @invariant()
    def all_agrees_with_the_sets(self) -> None:
        if not hasattr(self, "pool"):
            return
        for owner, tables in self.tables.items():
            assert [list(table) for table in self.pool.blocks(owner)] == tables
        for group, ledger in enumerate(self.pool.ledger()):
            parts = (ledger.free, ledger.held, ledger.cached, ledger.pinned, ledger.deferred)
            assert sum(parts) == ledger.total == self.counts[group] - 1
            held = {block for tables in self.tables.values() for block in tables[group] if block}
            assert ledger.held == len(held)
            kept = set(self._references(group))
            named = {block for g, block in self.cache.names if g == group}
            assert ledger.cached == len(named - kept)
            assert ledger.free == ledger.total - len(kept | named)


PagedMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestPagedMachine = PagedMachine.TestCase


def test_a_window_bounds_what_a_long_sequence_needs() -> None:
    pool, _ = _pool(5, shapes=[(4, WINDOW)])
    assert pool.probe(400).verdict is Verdict.NOW
    for length in range(MAX_CHUNK, 400, MAX_CHUNK):
        assert pool.grow(1, length) is not None
        pool.trim(1, length - WINDOW + 1, length)
    assert pool.ledger()[0].held <= 2
    small, _ = _pool(4, shapes=[(4, WINDOW)])
    assert small.probe(400).verdict is Verdict.NEVER


def test_a_far_reserve_does_not_fill_a_window_group() -> None:
    pool, _ = _pool(101, 5, shapes=[(4, None), (4, WINDOW)])
    assert pool.grow(1, 4, lookahead=(390, 390)) is not None
    assert [entry.held for entry in pool.ledger()] == [99, 2]


def test_a_named_block_is_copied_before_it_is_written_to() -> None:
    pool, _ = _pool(11)
    assert pool.grow(1, 8) is not None
    pool.fork(1, 2, 6)
    named = pool.blocks(1)[0][1]
    pool.retain(0, named)
    pool.release(1)
    growth = pool.grow(2, 7)
    assert [source for source, _ in growth.copies[0]] == [named]
    assert pool.ledger()[0].cached == 1


def test_trimmed_tokens_are_written_to_again() -> None:
    pool, _ = _pool(11)
    assert pool.grow(1, 8) is not None
    pool.trim(1, 0, 5)
    pool.fork(1, 2, 5)
    shared = pool.blocks(2)[0][1]
    assert [source for source, _ in pool.grow(1, 6).copies[0]] == [shared]


def test_an_inner_transaction_rolls_back_alone() -> None:
    pool, _ = _pool(11)
    with pool.transaction():
        pool.grow(1, 8)
        with pytest.raises(KeyError), pool.transaction():
            pool.grow(2, 8)
            raise KeyError
        pool.grow(3, 4)
    assert [len(pool.blocks(owner)[0]) for owner in (1, 3)] == [2, 1]
    assert pool.ledger()[0].held == 3


def test_blocks_that_were_evicted_for_a_failed_plan_are_free() -> None:
    pool, cache = _pool(11)
    pool.grow(1, 40)
    for block in pool.blocks(1)[0]:
        pool.retain(0, block)
        cache.names.append((0, block))
    with pytest.raises(KeyError), pool.transaction():
        pool.release(1)
        assert pool.grow(2, 20) is not None
        raise KeyError
    assert len(pool.blocks(1)[0]) == 10 and pool.ledger()[0].held == 10
    pool.release(1)
    assert (pool.ledger()[0].free, pool.ledger()[0].cached) == (5, 5)


def test_a_cache_that_gives_up_nothing_is_no_growth() -> None:
    groups = _groups((4, None))
    cache = NoCache(PrefixCacheContext(groups, (6,), ""))
    pool = PagedAllocator(AllocatorContext(groups, (6,), 400, 64, cache))
    pool.grow(1, 8)
    for block in pool.blocks(1)[0]:
        pool.retain(0, block)
    pool.release(1)
    assert pool.grow(2, 16) is None
    assert pool.ledger()[0].held == 0 and pool.grow(2, 12) is not None


def test_releases_after_a_fenced_step_are_free_at_once() -> None:
    pool, _ = _pool(6)
    pool.fence(4)
    pool.grow(1, 20)
    pool.release(1, after_step=4)
    assert pool.ledger()[0].free == 5


@pytest.mark.parametrize("change", ["adopt", "fork", "pin", "retain", "long fork"])
def test_what_exists_or_does_not_is_refused(change: str) -> None:
    pool, _ = _pool(6)
    pool.grow(1, 8)
    pool.grow(2, 4)
    pool.pin("p", 1, 1.0)
    calls: dict[str, Callable[[], object]] = {
        "adopt": lambda: pool.adopt(3, [[5]]),
        "fork": lambda: pool.fork(1, 2, 4),
        "pin": lambda: pool.pin("p", 1, 1.0),
        "retain": lambda: pool.retain(0, 5),
        "long fork": lambda: pool.fork(1, 4, 9),
    }
    before = pool.ledger()
    with pytest.raises(ValueError):
        calls[change]()
    assert pool.ledger() == before


def test_what_is_taken_back_is_not_noted_for_later() -> None:
    """The inverse of naming a block is to forget it, which has an inverse too."""
    allocator, _ = _pool(5)
    allocator.grow(1, 8)
    before = allocator.ledger()
    for group in (0, 0):
        with pytest.raises(KeyError), allocator.transaction():
            with pytest.raises(ZeroDivisionError), allocator.transaction():
                for block in allocator.blocks(1)[group]:
                    allocator.retain(group, block)
                allocator.pin("name", 1, 1.0)
                allocator.unpin("name")
                raise ZeroDivisionError
            assert allocator.ledger() == before
            raise KeyError
        assert allocator.ledger() == before
    allocator.release(1)
    assert allocator.ledger()[0].free == 4
