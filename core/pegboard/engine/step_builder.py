"""The step that a scheduler plans. It knows all limits and refuses sequences that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import index

import msgspec

from pegboard.engine.parts import EngineParts
from pegboard.engine.prefix.coming_prefixes import ComingPrefixes
from pegboard.engine.prefix.prefixes import Prefixes
from pegboard.engine.queue import Queue
from pegboard.engine.sequence import Sequence
from pegboard.engine.step_budget import has_headroom
from pegboard.interfaces.kv_allocator import Growth
from pegboard.interfaces.prefix_cache import Hit
from pegboard.interfaces.scheduler import SequenceView, StepBuilder


class Entry(msgspec.Struct, gc=False):
    """One sequence's part of a step.

    Attributes:
        seq: the sequence.
        start: tokens whose KV is in place before the step, or computed by steps in flight.
        num_tokens: known tokens to compute.
        samples: whether they end at the last known token.
        reserved: slots in all, with those made for later; 0: none were.
        growth: new table entries and copies.
        hit: blocks that a newly admitted sequence begins with; None: it ran already.
        is_fork: whether they are a sibling's, not a cache's.
        verify, propose: draft nodes to check now, and to propose for the next step.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    reserved: int
    growth: Growth
    hit: Hit | None
    is_fork: bool
    verify: int = 0
    propose: int = 0

    @property
    def end(self) -> int:
        """Tokens whose KV is in place after the step, drafts not counted."""
        return self.start + self.num_tokens

    @property
    def num_slots(self) -> int:
        """Slots in all, those for drafts not counted."""
        return max(self.end, self.reserved)


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned step, in force: queue and allocator agree with it.

    Attributes:
        entries: in the order of the batch's rows.
        admitted: those whose sequence begins to run.
        changed: those whose block tables or blocks change.
        num_preempted: sequences preempted for it.
        num_tokens: computed in it, draft nodes included.
        has_drafts: whether an entry verifies or proposes some.
    """

    entries: tuple[Entry, ...]
    admitted: tuple[Entry, ...]
    changed: tuple[Entry, ...]
    num_preempted: int
    num_tokens: int
    has_drafts: bool


class PlannedStep(StepBuilder):
    """One step's plan. Only the allocator knows of it before `apply`, inside its transaction, so a
    scheduler that raises leaves nothing behind.

    Attributes:
        waits_for_flight: whether the scheduler wanted to preempt a sequence in flight, which can be
            preempted once its steps are committed.

    Args:
        num_tokens: that it has room for, draft nodes not counted.
    """

    def __init__(
        self, parts: EngineParts, queue: Queue, prefixes: Prefixes, num_tokens: int
    ) -> None:
        self.waits_for_flight = False
        self._is_open = True
        self._allocator = parts.allocator
        self._groups = parts.groups
        self._draft_slots = parts.draft_slots
        self._speculates = parts.num_speculative_tokens > 0
        self._queue = queue
        self._prefixes = prefixes
        self._entries: dict[int, Entry] = {}
        self._changed: dict[int, Entry] = {}
        self._preempted: dict[int, Sequence] = {}
        self._coming: ComingPrefixes | None = None
        self._num_tokens = self._num_tokens_left = num_tokens
        self._num_draft_nodes = 0
        self._num_rows_left = queue.num_free_rows
        self._nothing: tuple[tuple[tuple[int, int], ...], ...] = tuple(() for _ in parts.groups)

    @property
    def is_empty(self) -> bool:
        """Whether no token is planned."""
        return not self._entries

    @property
    def num_tokens(self) -> int:
        """Tokens that are planned, draft nodes not counted."""
        return self._num_tokens - self._num_tokens_left

    @property
    def num_tokens_left(self) -> int:
        return self._num_tokens_left

    @property
    def num_rows_left(self) -> int:
        return self._num_rows_left

    def add(self, seq: SequenceView, num_tokens: int, reserve: int = 0) -> bool:
        seq_id, num_tokens, reserve = seq.seq_id, index(num_tokens), index(reserve)
        known = self._queue.sequence(seq_id)
        if known is None or seq_id in self._entries or seq_id in self._preempted:
            return False
        if num_tokens < 1 and not known.num_pending:
            return self._is_open
        if not self._is_open or self._num_tokens_left < 1 or num_tokens < 1:
            return False
        if known.row is None:
            return self._admit(known, num_tokens, reserve)
        return self._schedule(known, num_tokens, reserve, None)

    def num_cached(self, seq: SequenceView) -> int:
        known = self._waiting(seq)
        return 0 if known is None else self._prefixes.num_ready(known, self._preempted)

    def waits_for_prefix(self, seq: SequenceView) -> bool:
        known = self._waiting(seq)
        if known is None or known.seq_id in self._entries:
            return False
        if self._coming is None:
            self._coming = ComingPrefixes(self._prefixes, self._computing(), self._preempted)
        return self._coming.serve(known)

    def preempt(self, seq: SequenceView) -> bool:
        known = self._queue.sequence(seq.seq_id)
        if not self._is_open or known is None:
            return False
        is_planned = known.seq_id in self._entries
        if not is_planned and (known.row is None or known.seq_id in self._preempted):
            return False
        if known.is_in_flight:
            self.waits_for_flight = True
            return False
        if known is self._protected() or known.owner.keeps_state:
            return False
        if is_planned:
            self._withdraw(known)
        if known.row is not None:
            self._preempted[known.seq_id] = known
        if self._coming is not None:
            self._coming.discard(known.seq_id)
        self._allocator.release(known.seq_id)
        self._num_rows_left += 1
        return True

    def close(self) -> None:
        """Ends the scheduler's turn: from now on every answer to it is False."""
        self._is_open = False

    def sampling(self) -> list[Entry]:
        """Entries of rows that sample, in the order of the batch's rows."""
        return [entry for entry in self._entries.values() if entry.samples]

    def add_drafts(self, entry: Entry, verify: int, propose: int) -> int:
        """Lets an entry of the closed step verify up to so many nodes, as far as blocks are free, and
        propose if the blocks that the drafter needs are free.

        Returns:
            The number of nodes that it verifies.
        """
        seq_id, end = entry.seq.seq_id, entry.end
        growth = None
        if propose and self._draft_slots is not None:
            growth = self._allocator.grow(seq_id, end, self._drafting(verify, propose))
            if growth is None:
                propose = 0
        entry.propose = propose
        if growth is None and verify:
            growth = self._allocator.grow(seq_id, end, self._uniform(verify))
        if growth is None and verify:
            verify = min(verify, min(-end % group.block_size for group in self._groups))
            growth = self._allocator.grow(seq_id, end, self._uniform(verify)) if verify else None
        if growth is None:
            return 0
        if growth.new_blocks != self._nothing:
            self._prefixes.handed_out(growth)
            entry.growth = _joined(entry.growth, growth)
            self._changed[seq_id] = entry
        entry.verify = verify
        self._num_draft_nodes += verify
        return verify

    def apply(self, now: float) -> Plan:
        """Puts the plan in force: rows change hands, sequences begin where their entries say."""
        for seq in self._preempted.values():
            self._queue.preempt(seq)
        entries = tuple(self._entries.values())
        admitted = tuple(entry for entry in entries if entry.hit is not None)
        self._queue.admit([entry.seq for entry in admitted])
        for entry in admitted:
            seq = entry.seq
            seq.num_computed = entry.start
            seq.num_published = entry.start // self._prefixes.stride * self._prefixes.stride
            num_cached = 0 if entry.is_fork else entry.start
            if num_cached:
                self._prefixes.use(seq, num_cached)
            if seq.admitted_at is None:
                seq.admitted_at = now
                seq.num_cached_tokens = min(num_cached, seq.num_prompt)
        for entry in entries:
            seq = entry.seq
            seq.num_scheduled = entry.start + entry.num_tokens
            if entry.reserved > seq.num_reserved:
                seq.num_reserved = entry.reserved
        return Plan(
            entries,
            admitted,
            tuple(self._changed.values()),
            len(self._preempted),
            self.num_tokens + self._num_draft_nodes,
            self._speculates and _use_drafts(entries),
        )

    def _waiting(self, seq: SequenceView) -> Sequence | None:
        """The sequence, if it waits for a row and the scheduler may still ask."""
        known = self._queue.sequence(seq.seq_id)
        return known if self._is_open and known is not None and known.row is None else None

    def _admit(self, seq: Sequence, num_tokens: int, reserve: int) -> bool:
        if self._num_rows_left < 1 or not self._has_headroom(seq):
            return False
        if seq.owner.keeps_state:  # it is never preempted, so that all its slots are set aside
            reserve = seq.max_known
        hit, is_fork = self._prefixes.begin(seq, self._preempted)
        added = self._schedule(seq, num_tokens, reserve, hit, is_fork=is_fork)
        if added and not self._has_headroom(seq):
            self._withdraw(seq)
            added = False
        if not added:
            self._allocator.release(seq.seq_id)
        if not added and hit.num_tokens and not self._entries and not self._queue.num_running:
            # No sequence will give blocks back, so the hit's blocks must be room for others.
            added = self._schedule(seq, num_tokens, reserve, self._prefixes.miss)
        if added and self._coming is not None:
            self._coming.add(seq, self._entries[seq.seq_id].start)
        self._num_rows_left -= added
        return added

    def _withdraw(self, seq: Sequence) -> None:
        """Drops a sequence's entry."""
        entry = self._entries.pop(seq.seq_id)
        self._changed.pop(seq.seq_id, None)
        self._num_tokens_left += entry.num_tokens

    def _has_headroom(self, newcomer: Sequence) -> bool:
        """Whether running sequences have room to grow beside a newcomer."""
        num_rows = self._queue.num_running + self._queue.num_free_rows
        num_running = num_rows - self._num_rows_left
        return not num_running or has_headroom(
            self._allocator,
            self._groups,
            num_running,
            (
                (max(seq.num_reserved, seq.num_scheduled, end), seq.max_known - 1)
                for seq, _, end in self._running()
                if seq is not newcomer
            ),
        )

    def _computing(self) -> Iterator[tuple[Sequence, int]]:
        """Running sequences that have known tokens to compute, and the number of tokens in KV."""
        for seq, start, _ in self._running():
            if seq.num_known - start > 1:
                yield seq, start

    def _running(self) -> Iterator[tuple[Sequence, int, int]]:
        """Running sequences, the newly admitted included: each with its tokens in KV, and its slots by this
        plan."""
        for seq in self._queue.running:
            if seq.seq_id not in self._preempted:
                entry = self._entries.get(seq.seq_id)
                yield seq, seq.num_computed, entry.num_slots if entry else 0
        for entry in self._entries.values():
            if entry.hit is not None:
                yield entry.seq, entry.start, entry.num_slots

    def _schedule(
        self,
        seq: Sequence,
        num_tokens: int,
        reserve: int,
        hit: Hit | None,
        *,
        is_fork: bool = False,
    ) -> bool:
        start = seq.num_scheduled if hit is None else hit.num_tokens
        num_pending = seq.num_known - start
        if num_pending < 1 and not (num_pending := seq.num_pending):
            return True  # steps in flight compute all that is known of it
        if num_tokens > num_pending:
            num_tokens = num_pending
        if num_tokens > self._num_tokens_left:
            num_tokens = self._num_tokens_left
        samples = num_tokens == num_pending
        end = start + num_tokens
        if reserve:
            # The last token of a sequence is never computed, so it needs no slot.
            reserve = max(0, min(reserve, seq.max_known - 1 - end))
        growth = self._allocator.grow(seq.seq_id, end, self._uniform(reserve) if reserve else ())
        if growth is None:
            return False
        reserved = end + reserve if reserve else 0
        entry = self._entries[seq.seq_id] = Entry(
            seq, start, num_tokens, samples, reserved, growth, hit, is_fork
        )
        if growth.new_blocks != self._nothing:
            # At once: the blocks' old content is void also for sequences admitted later in this plan.
            self._prefixes.handed_out(growth)
            self._changed[seq.seq_id] = entry
        elif hit is not None:
            self._changed[seq.seq_id] = entry
        self._num_tokens_left -= num_tokens
        return True

    def _uniform(self, lookahead: int) -> tuple[int, ...]:
        """As many more slots in each group."""
        return (lookahead,) * len(self._groups)

    def _drafting(self, verify: int, propose: int) -> tuple[int, ...]:
        """More slots in each group where a row verifies and proposes: its model computes what this step
        brings, a token and the accepted nodes, and goes on from there."""
        assert self._draft_slots is not None
        own = verify + 1 + self._draft_slots.past(propose)
        target = self._groups[0].model
        return tuple(verify if group.model == target else own for group in self._groups)

    def _protected(self) -> Sequence | None:
        """The oldest of the highest class: it only ever grows, so that something always ends."""
        running = [seq for seq in self._queue.running if seq.seq_id not in self._preempted]
        running += [entry.seq for entry in self._entries.values() if entry.hit is not None]
        return min(running, key=lambda seq: (seq.priority, seq.arrival, seq.seq_id), default=None)


def _use_drafts(entries: Iterable[Entry]) -> bool:
    """Drops the drafts of these rows, which are verified now or void. Returns whether any are in flight."""
    has_drafts = False
    for entry in entries:
        seq = entry.seq
        seq.num_drafts, seq.confidences, seq.parents = 0, (), ()
        seq.has_drafts_in_flight = bool(entry.verify or entry.propose)
        has_drafts |= seq.has_drafts_in_flight
    return has_drafts


def _joined(first: Growth, second: Growth) -> Growth:
    """The changes of both."""
    return Growth(
        new_blocks=tuple(a + b for a, b in zip(first.new_blocks, second.new_blocks, strict=True)),
        copies=tuple(a + b for a, b in zip(first.copies, second.copies, strict=True)),
    )
