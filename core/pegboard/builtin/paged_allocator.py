"""The paged allocator: tables over one pool of blocks a KV group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from pegboard.builtin.block_pool import BlockPool, Kind
from pegboard.builtin.undo_log import UndoLog
from pegboard.interfaces.kv_allocator import (
    AllocatorContext,
    Answer,
    Growth,
    KVAllocator,
    KVLedger,
    Owner,
    PinnedBlocks,
    SharedBlocks,
    Verdict,
)


@dataclass(slots=True, eq=False)
class _Holding:
    """The holdings of one owner. Two owners' holdings are never the same, even with the same blocks.

    Attributes:
        tables: its blocks, a group; 0 where the window gave one back.
        num_tokens: what it grew to last, lookahead not counted.
        num_dropped: entries at the front of each table that are 0.
    """

    tables: tuple[list[int], ...]
    num_tokens: int
    num_dropped: list[int]


@dataclass(frozen=True, slots=True)
class _Pin:
    deadline: float
    blocks: tuple[tuple[int, ...], ...]


_Pairs = tuple[tuple[int, int], ...]


class PagedAllocator(KVAllocator, SharedBlocks, PinnedBlocks):
    """Any block can go to any owner; a block can have several references.

    A window group's owner never needs more blocks than its window and one chunk span, as long as
    the caller trims after each step and grows over the drafts that it accepts. With several steps in
    flight each has a chunk that is not trimmed yet: where that is too much, growing is refused until
    one of them is committed. When several groups have windows, `keep_from` of `trim` is one number for
    all, so the widest window counts.

    A rolled back transaction gives every block back; names that the prefix cache forgot meanwhile
    stay forgotten, which costs a hit, never a token.
    """

    def __init__(self, context: AllocatorContext) -> None:
        self._cache = context.cache
        self._max_chunk = context.max_chunk
        self._block_sizes = tuple(group.block_size for group in context.groups)
        self._windowed = tuple(group.window is not None for group in context.groups)
        widest = max((group.window or 0 for group in context.groups), default=0)
        self._span = widest - 1 + context.max_chunk
        self._pools = tuple(BlockPool(num_blocks) for num_blocks in context.num_blocks)
        self._holdings: dict[Owner, _Holding] = {}
        self._pins: dict[str, _Pin] = {}
        self._waiting: list[tuple[int, _Holding]] = []
        self._fenced = -1
        self._log = UndoLog()
        nothing: tuple[_Pairs, ...] = tuple(() for _ in context.groups)
        self._unchanged = Growth(new_blocks=nothing, copies=nothing)

    # Demands

    def probe(self, num_tokens: int, owner: Owner | None = None) -> Answer:
        holding = None if owner is None else self._holdings.get(owner)
        totals = tuple(pool.total for pool in self._pools)
        missing = []
        never = False
        for group, pool in enumerate(self._pools):
            demand = self._demand(group, num_tokens)
            never |= demand > pool.total
            if holding is not None:
                demand = min(demand, self._num_new(group, holding, num_tokens))
                demand += len(self._shared_entries(group, holding, num_tokens))
            missing.append(max(0, demand - pool.num_available))
        verdict = Verdict.NEVER if never else Verdict.LATER if any(missing) else Verdict.NOW
        return Answer(verdict=verdict, missing=tuple(missing), total=totals)

    def grow(self, owner: Owner, num_tokens: int, lookahead: Sequence[int] = ()) -> Growth | None:
        holding = self._holdings.get(owner)
        if holding is None:
            holding = _Holding(tuple([] for _ in self._pools), 0, [0] * len(self._pools))
        elif not self._changes(holding, num_tokens, lookahead):
            if num_tokens > holding.num_tokens:
                self._set_num_tokens(holding, num_tokens)
            return self._unchanged
        return self._extend(owner, holding, num_tokens, lookahead)

    def trim(self, owner: Owner, keep_from: int, keep_to: int) -> None:
        holding = self._holdings[owner]
        for group, block_size in enumerate(self._block_sizes):
            self._cut(group, holding, -(-keep_to // block_size))
            if self._windowed[group]:
                self._drop_front(group, holding, keep_from // block_size)
        if keep_to < holding.num_tokens:
            self._set_num_tokens(holding, keep_to)

    def release(self, owner: Owner, after_step: int | None = None) -> None:
        holding = self._holdings.pop(owner, None)
        if holding is None:
            return
        self._log.note(self._holdings.__setitem__, owner, holding)
        if after_step is None or after_step <= self._fenced:
            self._drop(holding, Kind.HELD)
            return
        self._move_all(holding.tables, Kind.HELD, Kind.DEFERRED)
        waiting = (after_step, holding)
        self._waiting.append(waiting)
        self._log.note(self._waiting.remove, waiting)

    def fence(self, step_id: int) -> None:
        fenced, waiting = self._fenced, self._waiting
        self._fenced = max(fenced, step_id)
        self._waiting = [entry for entry in waiting if entry[0] > self._fenced]
        self._log.note(self._restore_fence, fenced, waiting)
        for after_step, holding in waiting:
            if after_step <= self._fenced:
                self._drop(holding, Kind.DEFERRED)

    def _drop(self, holding: _Holding, kind: Kind) -> None:
        for group, table in enumerate(holding.tables):
            # The block freed last is handed out first; beginnings are the likeliest to be cached.
            self._move(group, reversed(table), kind, None)

    def _restore_fence(self, fenced: int, waiting: list[tuple[int, _Holding]]) -> None:
        self._fenced, self._waiting = fenced, waiting

    def ledger(self) -> tuple[KVLedger, ...]:
        return tuple(pool.ledger() for pool in self._pools)

    def transaction(self) -> AbstractContextManager[None]:
        return self._log.transaction()

    # Shared blocks

    def blocks(self, owner: Owner) -> tuple[Sequence[int], ...]:
        return tuple(tuple(table) for table in self._holdings[owner].tables)

    def adopt(self, owner: Owner, blocks: Sequence[Sequence[int]]) -> None:
        for group, ids in enumerate(blocks):
            for block in ids:
                if block != 0 and self._pools[group].is_free(block):
                    raise ValueError(f"block {block} of group {group} is free")
        tables = tuple(list(ids) for ids in blocks)
        self._share(owner, tables, self._capacity(tables))

    def fork(self, owner: Owner, child: Owner, num_tokens: int) -> None:
        parent = self._holdings[owner]
        if num_tokens > self._capacity(parent.tables):
            raise ValueError(f"owner {owner!r} has no slots for {num_tokens} tokens")
        tables = tuple(
            table[: -(-num_tokens // block_size)]
            for table, block_size in zip(parent.tables, self._block_sizes, strict=True)
        )
        self._share(child, tables, num_tokens)

    def retain(self, group: int, block: int) -> None:
        pool = self._pools[group]
        if block == 0 or pool.is_free(block):
            raise ValueError(f"block {block} of group {group} is free")
        if not pool.is_cached(block):
            pool.move(block, None, Kind.CACHED)
            self._log.note(self.forget, group, block)

    def forget(self, group: int, block: int) -> None:
        pool = self._pools[group]
        if pool.is_cached(block):
            pool.move(block, Kind.CACHED, None)
            self._log.note(pool.move, block, None, Kind.CACHED)

    # Pins

    def pin(self, name: str, owner: Owner, deadline: float) -> tuple[Sequence[int], ...]:
        if name in self._pins:
            raise ValueError(f"pin {name!r} exists already")
        pin = _Pin(deadline, tuple(tuple(table) for table in self._holdings[owner].tables))
        self._pins[name] = pin
        self._log.note(self._pins.__delitem__, name)
        self._move_all(pin.blocks, None, Kind.PINNED)
        return pin.blocks

    def unpin(self, name: str) -> None:
        pin = self._pins.pop(name, None)
        if pin is None:
            return
        self._log.note(self._pins.__setitem__, name, pin)
        self._move_all(pin.blocks, Kind.PINNED, None)

    def expire(self, now: float) -> tuple[str, ...]:
        names = tuple(name for name, pin in self._pins.items() if pin.deadline <= now)
        for name in names:
            self.unpin(name)
        return names

    # Growing

    def _share(self, owner: Owner, tables: tuple[list[int], ...], num_tokens: int) -> None:
        """Makes an owner that begins with blocks of others."""
        if owner in self._holdings:
            raise ValueError(f"owner {owner!r} exists already")
        self._add_holding(
            owner, _Holding(tables, num_tokens, [_num_leading_gaps(table) for table in tables])
        )
        self._move_all(tables, None, Kind.HELD)

    def _capacity(self, tables: Sequence[Sequence[int]]) -> int:
        """Slots that these blocks have in every group."""
        sizes = zip(tables, self._block_sizes, strict=True)
        return min(len(table) * block_size for table, block_size in sizes)

    def _demand(self, group: int, num_tokens: int) -> int:
        """Most blocks that a sequence of so many tokens has at one time."""
        block_size = self._block_sizes[group]
        demand = -(-num_tokens // block_size)
        if not self._windowed[group]:
            return demand
        return min(demand, (self._span + block_size - 2) // block_size + 1)

    def _num_new(self, group: int, holding: _Holding, num_slots: int) -> int:
        return max(0, -(-num_slots // self._block_sizes[group]) - len(holding.tables[group]))

    def _shared_entries(self, group: int, holding: _Holding, num_slots: int) -> list[int]:
        """Table entries up to `num_slots` that will be written to and have another reference."""
        shared = self._pools[group].shared
        if not shared:
            return []
        table = holding.tables[group]
        block_size = self._block_sizes[group]
        end = min(len(table), -(-num_slots // block_size))
        first = holding.num_tokens // block_size
        return [entry for entry in range(first, end) if table[entry] in shared]

    def _changes(self, holding: _Holding, num_tokens: int, lookahead: Sequence[int]) -> bool:
        """Whether growing so far needs a block. The common answer, no, must be quick."""
        num_slots = num_tokens
        for group, block_size in enumerate(self._block_sizes):
            if lookahead:
                num_slots = num_tokens + lookahead[group]
            table = holding.tables[group]
            if num_slots > len(table) * block_size:
                return True
            shared = self._pools[group].shared
            if shared:
                first, end = holding.num_tokens // block_size, -(-num_slots // block_size)
                if not shared.isdisjoint(table[first:end]):
                    return True
        return False

    def _extend(
        self, owner: Owner, holding: _Holding, num_tokens: int, lookahead: Sequence[int]
    ) -> Growth | None:
        demands = []
        for group, windowed in enumerate(self._windowed):
            num_slots = num_tokens + (lookahead[group] if lookahead else 0)
            if windowed:
                # Slots past the next chunk replace ones that will have left the window by then.
                num_slots = min(num_slots, max(num_tokens, holding.num_tokens + self._max_chunk))
            entries = self._shared_entries(group, holding, num_slots)
            demands.append((group, entries, self._num_new(group, holding, num_slots)))
        for group, entries, num_new in demands:
            if not self._make_free(group, len(entries) + num_new):
                return None
        if owner not in self._holdings:
            self._add_holding(owner, holding)
        new_blocks, copies = [], []
        for group, entries, num_new in demands:
            replaced, copied = self._own(group, holding, entries) if entries else ((), ())
            new_blocks.append(replaced + self._append(group, holding, num_new))
            copies.append(copied)
        if num_tokens > holding.num_tokens:
            self._set_num_tokens(holding, num_tokens)
        return Growth(new_blocks=tuple(new_blocks), copies=tuple(copies))

    def _make_free(self, group: int, num_blocks: int) -> bool:
        """Whether so many blocks are free, the cache having been asked to give up some."""
        pool = self._pools[group]
        if num_blocks > pool.num_available:
            return False
        while (missing := num_blocks - pool.num_free) > 0:
            evicted = self._cache.evict(group, missing, pool.is_evictable)
            for block in evicted:
                # Not noted: the cache cannot take a name back.
                pool.move(block, Kind.CACHED, None)
            if not evicted:
                return False
        return True

    def _own(self, group: int, holding: _Holding, entries: list[int]) -> tuple[_Pairs, _Pairs]:
        """Replaces shared blocks by the owner's own; returns (entry, block) and (from, to)."""
        table = holding.tables[group]
        replaced, copies = [], []
        for entry in entries:
            source, target = table[entry], self._take(group)
            self._set(table, slice(entry, entry + 1), [target])
            self._move(group, (source,), Kind.HELD, None)
            replaced.append((entry, target))
            copies.append((source, target))
        return tuple(replaced), tuple(copies)

    def _append(self, group: int, holding: _Holding, count: int) -> _Pairs:
        """Appends so many new blocks; returns (entry, block)."""
        if not count:
            return ()
        table = holding.tables[group]
        length = len(table)
        blocks = [self._take(group) for _ in range(count)]
        self._set(table, slice(length, length), blocks)
        return tuple(enumerate(blocks, start=length))

    def _cut(self, group: int, holding: _Holding, length: int) -> None:
        table = holding.tables[group]
        dropped = table[length:]
        if dropped:
            self._set(table, slice(length, len(table)), [])
            self._move(group, dropped, Kind.HELD, None)

    def _drop_front(self, group: int, holding: _Holding, end: int) -> None:
        table = holding.tables[group]
        start, end = holding.num_dropped[group], min(end, len(table))
        if start < end:
            dropped = table[start:end]
            self._set(table, slice(start, end), [0] * (end - start))
            holding.num_dropped[group] = end
            self._log.note(holding.num_dropped.__setitem__, group, start)
            self._move(group, dropped, Kind.HELD, None)

    # Changes that a transaction can take back

    def _take(self, group: int) -> int:
        pool = self._pools[group]
        block = pool.take()
        self._log.note(pool.move, block, Kind.HELD, None)
        return block

    def _move(
        self, group: int, blocks: Iterable[int], source: Kind | None, target: Kind | None
    ) -> None:
        """Moves one reference of each block from one kind to another; 0 is a gap and has none."""
        pool = self._pools[group]
        moved = [block for block in blocks if block != 0]
        pool.move_all(moved, source, target)
        self._log.note(pool.move_all, reversed(moved), target, source)

    def _move_all(
        self, tables: Sequence[Sequence[int]], source: Kind | None, target: Kind | None
    ) -> None:
        """Moves one reference of each block of each group."""
        for group, blocks in enumerate(tables):
            self._move(group, blocks, source, target)

    def _set(self, table: list[int], part: slice, blocks: list[int]) -> None:
        before = table[part]
        table[part] = blocks
        after = slice(part.start, part.start + len(blocks))
        self._log.note(table.__setitem__, after, before)

    def _set_num_tokens(self, holding: _Holding, num_tokens: int) -> None:
        before = holding.num_tokens
        holding.num_tokens = num_tokens
        self._log.note(setattr, holding, "num_tokens", before)

    def _add_holding(self, owner: Owner, holding: _Holding) -> None:
        self._holdings[owner] = holding
        self._log.note(self._holdings.__delitem__, owner)


def _num_leading_gaps(table: Sequence[int]) -> int:
    return next((entry for entry, block in enumerate(table) if block != 0), len(table))
