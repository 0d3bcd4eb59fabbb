"""The contiguous allocator: each sequence has one run of blocks, as long as it can ever need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import (
    AllocatorContext,
    Answer,
    Growth,
    KVAllocator,
    KVLedger,
    Owner,
    Verdict,
)


@dataclass(frozen=True, slots=True)
class _RunsOfGroup:
    """A group's blocks, cut into runs of one length; run p begins at block 1 + p * length.

    Attributes:
        total: blocks.
        length: blocks of a run.
        block_size: tokens of a block.
        window: as in `KVGroup`.
    """

    total: int
    length: int
    block_size: int
    window: int | None

    def block(self, place: int, entry: int) -> int:
        """The block at a table entry. A windowed run is a ring: its entries come round again."""
        return 1 + place * self.length + entry % self.length

    def num_entries(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_entry(self, num_tokens: int) -> int:
        """The first that the token after so many can still see."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // self.block_size


class _Holding(NamedTuple):
    """The holding of an owner: the same run in each group.

    Attributes:
        place: which run.
        num_tokens: what it grew to last, lookahead not counted.
        starts, ends: table entries handed out, a group; those before a start left the window.
    """

    place: int
    num_tokens: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(slots=True)
class _State:
    """All that changes: what a failed transaction takes back.

    Attributes:
        holdings: by owner.
        free: places of nobody.
        waiting: places that are free once a step is fenced.
        fenced: the newest fenced step.
    """

    holdings: dict[Owner, _Holding]
    free: set[int]
    waiting: list[tuple[int, int]]
    fenced: int = -1

    def copy(self) -> _State:
        return _State(dict(self.holdings), set(self.free), list(self.waiting), self.fenced)


class ContiguousAllocator(KVAllocator):
    """At its first growth an owner gets consecutive blocks for `max_model_len` tokens in every group,
    the first run that is free; what its tokens do not use yet is reserved for it alone.

    Every run of a group has the same length, so a gap between two is never too small for another;
    what is lost to fragments is the rest at the end of the pool, shorter than a run. A group with a
    window gets what can be seen at one time, the window and a chunk, used as a ring: it is trimmed by
    growing alone, since a block's turn comes again when its tokens have left the window.
    """

    def __init__(self, context: AllocatorContext) -> None:
        self._max_chunk = context.max_chunk
        self._groups = tuple(
            _runs(group, num_blocks - 1, context)
            for group, num_blocks in zip(context.groups, context.num_blocks, strict=True)
        )
        num_places = min(group.total // group.length for group in self._groups)
        self._state = _State({}, set(range(num_places)), [])
        self._num_places = num_places
        self._no_copies: tuple[tuple[tuple[int, int], ...], ...] = tuple(() for _ in self._groups)

    def probe(self, num_tokens: int, owner: Owner | None = None) -> Answer:
        missing = [0] * len(self._groups)
        verdict = Verdict.NOW
        if owner not in self._state.holdings and not self._state.free:
            missing = [max(0, group.length - self._num_free(group)) for group in self._groups]
            verdict = Verdict.LATER
        if not self._num_places or any(
            group.window is None and group.num_entries(num_tokens) > group.length
            for group in self._groups
        ):
            verdict = Verdict.NEVER
        return Answer(verdict, tuple(missing), tuple(group.total for group in self._groups))

    def grow(self, owner: Owner, num_tokens: int, lookahead: Sequence[int] = ()) -> Growth | None:
        state, known = self._state, self._state.holdings.get(owner)
        if known is None and not state.free:
            return None
        nothing = (0,) * len(self._groups)
        holding = known or _Holding(min(state.free), 0, nothing, nothing)
        ranges = self._new_entries(holding, num_tokens, lookahead)
        if ranges is None:
            return None
        state.free.discard(holding.place)
        state.holdings[owner] = _Holding(
            holding.place,
            max(num_tokens, holding.num_tokens),
            tuple(self._starts(holding)),
            tuple(entries.stop for entries in ranges),
        )
        new_blocks = tuple(
            tuple((entry, group.block(holding.place, entry)) for entry in entries)
            for group, entries in zip(self._groups, ranges, strict=True)
        )
        return Growth(new_blocks=new_blocks, copies=self._no_copies)

    def _new_entries(
        self, holding: _Holding, num_tokens: int, lookahead: Sequence[int]
    ) -> list[range] | None:
        """Table entries to hand out, a group; None when they are more than a run has left."""
        ranges = []
        more = lookahead or (0,) * len(self._groups)
        for group, start, end, ahead in zip(
            self._groups, self._starts(holding), holding.ends, more, strict=True
        ):
            num_slots = num_tokens + ahead
            if group.window is not None:
                # Slots past the next chunk take the blocks of tokens that can still be seen.
                num_slots = min(num_slots, max(num_tokens, holding.num_tokens + self._max_chunk))
            new_end = max(end, group.num_entries(num_slots))
            if new_end - start > group.length:
                return None
            ranges.append(range(end, new_end))
        return ranges

    def _starts(self, holding: _Holding) -> Iterator[int]:
        for group, start in zip(self._groups, holding.starts, strict=True):
            yield max(start, group.first_entry(holding.num_tokens))

    def trim(self, owner: Owner, keep_from: int, keep_to: int) -> None:
        holding = self._state.holdings[owner]
        starts, ends = [], []
        for group, start, end in zip(self._groups, holding.starts, holding.ends, strict=True):
            end = min(end, group.num_entries(keep_to))
            if group.window is not None:
                start = max(start, min(keep_from // group.block_size, end))
            starts.append(min(start, end))
            ends.append(end)
        self._state.holdings[owner] = _Holding(
            holding.place, min(holding.num_tokens, keep_to), tuple(starts), tuple(ends)
        )

    def release(self, owner: Owner, after_step: int | None = None) -> None:
        state, holding = self._state, self._state.holdings.pop(owner, None)
        if holding is None:
            return
        if after_step is None or after_step <= state.fenced:
            state.free.add(holding.place)
        else:
            state.waiting.append((after_step, holding.place))

    def fence(self, step_id: int) -> None:
        state = self._state
        state.fenced = max(state.fenced, step_id)
        state.free.update(place for step, place in state.waiting if step <= state.fenced)
        state.waiting = [entry for entry in state.waiting if entry[0] > state.fenced]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        before = self._state.copy()
        try:
            yield
        except BaseException:
            self._state = before
            raise

    def ledger(self) -> tuple[KVLedger, ...]:
        state = self._state
        holdings: Sequence[_Holding] = tuple(state.holdings.values())
        entries = []
        for index, group in enumerate(self._groups):
            held = sum(holding.ends[index] - holding.starts[index] for holding in holdings)
            entries.append(
                KVLedger(
                    total=group.total,
                    free=self._num_free(group),
                    held=held,
                    reserved=len(holdings) * group.length - held,
                    deferred=len(state.waiting) * group.length,
                )
            )
        return tuple(entries)

    def _num_free(self, group: _RunsOfGroup) -> int:
        """Blocks in nobody's run, those at the end that make no run included."""
        num_taken = len(self._state.holdings) + len(self._state.waiting)
        return group.total - num_taken * group.length


def _runs(group: KVGroup, total: int, context: AllocatorContext) -> _RunsOfGroup:
    length = -(-context.max_model_len // group.block_size)
    if group.window is not None:
        seen = group.window - 1 + context.max_chunk
        # So many tokens lie in one block more when they begin at a block's end.
        length = min(length, (seen + group.block_size - 2) // group.block_size + 1)
    return _RunsOfGroup(total, length, group.block_size, group.window)
