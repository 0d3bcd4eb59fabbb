"""`PoolModel`, an allocator made of sets, and random operations that compare a real one with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import (
    AllocatorContext,
    Growth,
    KVAllocator,
    KVLedger,
    Verdict,
)
from pegboard.interfaces.prefix_cache import Hit, Prefix, PrefixCache

Block = tuple[int, int]
"""A group's index and a block of it."""


class CacheOfBlocks(PrefixCache):
    """A prefix cache that only holds blocks: a test names them, the allocator evicts them."""

    def __init__(self) -> None:
        self.names: list[Block] = []

    def match(self, prefix: Prefix, limit: int) -> Hit:
        return Hit(0, ())

    def use(self, prefix: Prefix, num_tokens: int) -> None:
        pass

    def publish(self, prefix: Prefix, blocks: Sequence[Sequence[int]]) -> Sequence[Block]:
        return ()

    def evict(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> Sequence[int]:
        victims = [name for name in self.names if name[0] == group and evictable(name[1])]
        victims = victims[:num_blocks]
        self.names = [block for block in self.names if block not in victims]
        return [block for _, block in victims]

    def clear(self) -> Sequence[Block]:
        forgotten, self.names = self.names, []
        return forgotten


class PoolModel:
    """References to blocks: the model that an allocator is compared with.

    Attributes:
        tables: owner to its blocks, a group, in order; 0 where the window gave one back.
        written: owner to the tokens that its last growth was for.
        pins: name to deadline and blocks.
        deferred: blocks that wait for a step, a reference each.
    """

    def __init__(self, groups: Sequence[KVGroup], num_blocks: Sequence[int]) -> None:
        self.groups = groups
        self.totals = [count - 1 for count in num_blocks]
        self.tables: dict[int, list[list[int]]] = {}
        self.written: dict[int, int] = {}
        self.pins: dict[str, tuple[float, set[Block]]] = {}
        self.deferred: list[tuple[int, set[Block]]] = []

    def num_blocks(self, group: int, num_tokens: int) -> int:
        return -(-num_tokens // self.groups[group].block_size)

    def blocks_of(self, owner: int) -> set[Block]:
        return {(g, p) for g, table in enumerate(self.tables[owner]) for p in table if p}

    def held(self) -> set[Block]:
        return {block for owner in self.tables for block in self.blocks_of(owner)}

    def pinned(self) -> set[Block]:
        return {block for _, blocks in self.pins.values() for block in blocks}

    def waiting(self) -> set[Block]:
        return {block for _, blocks in self.deferred for block in blocks}

    def references(self, block: Block) -> int:
        """Owners and pins that reference a block; the cache's reference is no reason to copy."""
        owners = sum(block in self.blocks_of(owner) for owner in self.tables)
        return owners + sum(block in blocks for _, blocks in self.pins.values())

    def wanted(self, owner: int, num_tokens: int, lookahead: int = 0) -> list[set[int]]:
        """Table entries that must get a block of the owner's own, a group."""
        slots = num_tokens + lookahead
        written = self.written.get(owner, 0)
        wanted = []
        for g, group in enumerate(self.groups):
            table = self.tables[owner][g] if owner in self.tables else []
            entries = set(range(len(table), self.num_blocks(g, slots)))
            for entry in range(
                written // group.block_size, min(len(table), self.num_blocks(g, slots))
            ):
                if table[entry] and self.references((g, table[entry])) > 1:
                    entries.add(entry)
            wanted.append(entries)
        return wanted


class AllocatorMachine(RuleBasedStateMachine):
    """Random calls of `KVAllocator` on an allocator and on the model of it.

    An allocator may set blocks aside for a sequence: `probe` is asked whether there is room, and its
    answer must come true.
    """

    def __init__(self, make: Callable[[AllocatorContext], KVAllocator]) -> None:
        super().__init__()
        self._make = make
        self._next_owner = 0
        self._step = 0

    @initialize(
        sizes=st.lists(st.sampled_from([1, 3, 4]), min_size=1, max_size=2),
        counts=st.lists(st.integers(2, 13), min_size=2, max_size=2),
        max_model_len=st.sampled_from([4, 8, 12, 24, 1024]),
    )
    def begin(self, sizes: list[int], counts: list[int], max_model_len: int) -> None:
        groups = tuple(KVGroup((i,), 1, 8, s, None, "none", "float32") for i, s in enumerate(sizes))
        num_blocks = tuple(counts[: len(groups)])
        self.cache = CacheOfBlocks()
        self.model = PoolModel(groups, num_blocks)
        self.max_model_len = max_model_len
        self.pool: Any = self._make(
            AllocatorContext(groups, num_blocks, max_model_len, 64, self.cache)
        )

    def _free(self, group: int) -> int:
        taken = {block for block in self._taken() if block[0] == group}
        return self.model.totals[group] - len(taken)

    def _taken(self) -> set[Block]:
        """Blocks that cannot be handed out; those that only the cache holds can."""
        return self.model.held() | self.model.pinned() | self.model.waiting()

    def _owner(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model.tables)), label="owner")

    @rule(num_tokens=st.integers(1, 20), lookahead=st.integers(0, 5))
    def begin_sequence(self, num_tokens: int, lookahead: int) -> None:
        self._next_owner += 1
        self._grow(self._next_owner, num_tokens, lookahead)

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data(), more=st.integers(0, 9), lookahead=st.integers(0, 5))
    def grow_sequence(self, data: st.DataObject, more: int, lookahead: int) -> None:
        owner = self._owner(data)
        self._grow(owner, self.model.written[owner] + more, lookahead)

    def _grow(self, owner: int, num_tokens: int, lookahead: int) -> None:
        num_tokens = min(num_tokens, self.max_model_len)
        lookahead = min(lookahead, self.max_model_len - num_tokens)
        wanted = self.model.wanted(owner, num_tokens, lookahead)
        fits = self._fits(owner, num_tokens + lookahead, wanted)
        taken = self._taken()
        growth = self.pool.grow(owner, num_tokens, (lookahead,) * len(self.model.groups))
        assert (growth is not None) == fits
        if growth is not None:
            self._apply(owner, growth, wanted, taken)
            self.model.written[owner] = num_tokens

    def _fits(self, owner: int, num_slots: int, wanted: list[set[int]]) -> bool:
        fits: bool = self.pool.probe(num_slots, owner).verdict is Verdict.NOW
        assert not fits or all(len(wanted[g]) <= self._free(g) for g in range(len(wanted)))
        return fits

    def _apply(self, owner: int, growth: Growth, wanted: list[set[int]], taken: set[Block]) -> None:
        tables = self.model.tables.setdefault(owner, [[] for _ in self.model.groups])
        for g, table in enumerate(tables):
            new = dict(growth.new_blocks[g])
            assert set(new) == wanted[g] and len(new) == len(growth.new_blocks[g])
            blocks = list(new.values())
            assert len(set(blocks)) == len(blocks) and all(
                1 <= block <= self.model.totals[g] and (g, block) not in taken for block in blocks
            )
            copied = {(table[entry], new[entry]) for entry in new if entry < len(table)}
            assert set(growth.copies[g]) == copied
            for entry in sorted(new):
                table[entry : entry + 1] = [new[entry]]

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data(), kept_drafts=st.integers(0, 3))
    def drop_drafts(self, data: st.DataObject, kept_drafts: int) -> None:
        owner = self._owner(data)
        keep_to = self.model.written[owner] + kept_drafts
        self.pool.trim(owner, 0, keep_to)
        for g, table in enumerate(self.model.tables[owner]):
            del table[self.model.num_blocks(g, keep_to) :]

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data(), later=st.sampled_from([None, 0, 1, 2]))
    def release(self, data: st.DataObject, later: int | None) -> None:
        owner = self._owner(data)
        step = None if later is None else self._step + 1 + later
        self.pool.release(owner, step)
        if step is not None:
            self.model.deferred.append((step, self.model.blocks_of(owner)))
        del self.model.tables[owner], self.model.written[owner]

    @rule(steps=st.integers(1, 3))
    def fence(self, steps: int) -> None:
        self._step += steps
        self.pool.fence(self._step)
        self.model.deferred = [entry for entry in self.model.deferred if entry[0] > self._step]

    @rule(data=st.data(), num_tokens=st.integers(1, 30))
    def fail_half_way(self, data: st.DataObject, num_tokens: int) -> None:
        before = self.pool.ledger()
        try:
            with self.pool.transaction():
                self.pool.grow("a new one", 3)
                if self.model.tables:
                    owner = self._owner(data)
                    self.pool.grow(owner, self.model.written[owner] + num_tokens)
                    self.pool.release(owner)
                raise InterruptedError
        except InterruptedError:
            pass
        after = self.pool.ledger()
        # Blocks that were evicted on the way may be free now: the cache has forgotten them.
        assert [(e.held, e.pinned, e.deferred, e.free + e.cached) for e in after] == [
            (e.held, e.pinned, e.deferred, e.free + e.cached) for e in before
        ]

    @rule(data=st.data(), num_tokens=st.integers(1, 60))
    def probe(self, data: st.DataObject, num_tokens: int) -> None:
        owner = data.draw(st.sampled_from([None, *sorted(self.model.tables)]), label="owner")
        if owner is not None:
            num_tokens += self.model.written[owner]
        num_tokens = min(num_tokens, self.max_model_len)
        before = self.pool.ledger()
        answer = self.pool.probe(num_tokens, owner)
        assert self.pool.ledger() == before and answer.total == tuple(self.model.totals)
        never = any(
            self.model.num_blocks(g, num_tokens) > total
            for g, total in enumerate(self.model.totals)
        )
        assert answer.verdict is Verdict.NEVER or not never
        assert answer.verdict is not Verdict.LATER or self._taken() or self.cache.names
        if answer.verdict is not Verdict.NEVER:
            assert any(answer.missing) == (answer.verdict is Verdict.LATER)
            wanted = self.model.wanted(-1 if owner is None else owner, num_tokens)
            self._check_missing(answer.missing, wanted)

    def _check_missing(self, missing: tuple[int, ...], wanted: list[set[int]]) -> None:
        assert all(
            missing[g] >= max(0, len(entries) - self._free(g)) for g, entries in enumerate(wanted)
        )

    @invariant()
    def ledger_adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        held, pinned, waiting = self.model.held(), self.model.pinned(), self.model.waiting()
        cached = set(self.cache.names)
        for g, entry in enumerate(self.pool.ledger()):
            mine = {
                name: {p for p in blocks if p[0] == g}
                for name, blocks in (
                    ("held", held),
                    ("pinned", pinned),
                    ("waiting", waiting),
                    ("cached", cached),
                )
            }
            parts = (entry.free, entry.held, entry.cached, entry.pinned, entry.reserved)
            assert sum(parts) + entry.deferred == entry.total == self.model.totals[g]
            assert min(*parts, entry.deferred) >= 0 and entry.held == len(mine["held"])
            everything = mine["held"] | mine["pinned"] | mine["waiting"] | mine["cached"]
            self._check_free(entry, len(everything))
            alone = mine["cached"] - mine["held"] - mine["pinned"] - mine["waiting"]
            assert entry.cached >= len(alone)
            assert entry.pinned >= len(mine["pinned"] - mine["held"] - mine["waiting"] - cached)

    def _check_free(self, entry: KVLedger, num_referenced: int) -> None:
        """Without owners nothing is set aside."""
        assert entry.free <= entry.total - num_referenced
        if not (self.model.tables or self.model.deferred or num_referenced):
            assert entry.free == entry.total


class OnDemandMachine(AllocatorMachine):
    """The same, of an allocator that sets nothing aside: its answers are known exactly."""

    def _fits(self, owner: int, num_slots: int, wanted: list[set[int]]) -> bool:
        return all(len(wanted[g]) <= self._free(g) for g in range(len(wanted)))

    def _check_missing(self, missing: tuple[int, ...], wanted: list[set[int]]) -> None:
        assert missing == tuple(
            max(0, len(entries) - self._free(g)) for g, entries in enumerate(wanted)
        )

    @rule(data=st.data(), num_tokens=st.integers(1, 60))
    def never_exactly_when_an_empty_pool_is_too_small(
        self, data: st.DataObject, num_tokens: int
    ) -> None:
        owner = data.draw(st.sampled_from([None, *sorted(self.model.tables)]), label="owner")
        num_tokens = min(num_tokens, self.max_model_len)
        never = any(
            self.model.num_blocks(g, num_tokens) > total
            for g, total in enumerate(self.model.totals)
        )
        assert (self.pool.probe(num_tokens, owner).verdict is Verdict.NEVER) == never

    def _check_free(self, entry: KVLedger, num_referenced: int) -> None:
        assert entry.free == entry.total - num_referenced


class SharingMachine(OnDemandMachine):
    """The same with forks, adoptions and a cache."""

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data(), back=st.integers(0, 6))
    def fork(self, data: st.DataObject, back: int) -> None:
        owner = self._owner(data)
        num_tokens = max(1, self.model.written[owner] - back)
        self._next_owner += 1
        child = self._next_owner
        self.pool.fork(owner, child, num_tokens)
        self.model.tables[child] = [
            table[: self.model.num_blocks(g, num_tokens)]
            for g, table in enumerate(self.model.tables[owner])
        ]
        self.model.written[child] = num_tokens

    def _full(self, owner: int) -> int:
        """Tokens of the owner's beginning that fill blocks of every group."""
        written = self.model.written[owner]
        sizes = [group.block_size for group in self.model.groups]
        return max(n for n in range(written + 1) if all(n % size == 0 for size in sizes))

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        owner = self._owner(data)
        num_tokens = self._full(owner)
        if num_tokens == 0:
            return
        self._next_owner += 1
        tables = [
            table[: self.model.num_blocks(g, num_tokens)]
            for g, table in enumerate(self.model.tables[owner])
        ]
        self.pool.adopt(self._next_owner, tables)
        self.model.tables[self._next_owner] = tables
        self.model.written[self._next_owner] = num_tokens

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data())
    def cache_blocks(self, data: st.DataObject) -> None:
        owner = self._owner(data)
        for g, table in enumerate(self.model.tables[owner]):
            for block in table[: self._full(owner) // self.model.groups[g].block_size]:
                if (g, block) not in self.cache.names:
                    self.pool.retain(g, block)
                    self.cache.names.append((g, block))

    @rule()
    def clear_cache(self) -> None:
        for group, block in self.cache.clear():
            self.pool.forget(group, block)

    @invariant()
    def blocks_are_what_growth_said(self) -> None:
        if hasattr(self, "pool"):
            for owner, tables in self.model.tables.items():
                assert [list(blocks) for blocks in self.pool.blocks(owner)] == tables


class PinMachine(SharingMachine):
    """The same with pins."""

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data(), name=st.sampled_from(["a", "b", "c"]), deadline=st.floats(1.0, 9.0))
    def pin(self, data: st.DataObject, name: str, deadline: float) -> None:
        if name in self.model.pins:
            return
        owner = self._owner(data)
        blocks = self.pool.pin(name, owner, deadline)
        assert [list(group) for group in blocks] == self.model.tables[owner]
        self.model.pins[name] = (deadline, self.model.blocks_of(owner))

    @rule(name=st.sampled_from(["a", "b", "c"]))
    def unpin(self, name: str) -> None:
        self.pool.unpin(name)
        self.model.pins.pop(name, None)

    @rule(now=st.floats(0.0, 10.0))
    def expire(self, now: float) -> None:
        gone = {name for name, (deadline, _) in self.model.pins.items() if deadline < now}
        on_time = {name for name, (deadline, _) in self.model.pins.items() if deadline == now}
        expired = set(self.pool.expire(now))
        assert gone <= expired <= gone | on_time
        for name in expired:
            del self.model.pins[name]
