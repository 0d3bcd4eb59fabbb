"""Contract suites of `KVAllocator`, `SharedBlocks` and `PinnedBlocks`.

    class TestMyAllocator(KVAllocatorContract):
        @pytest.fixture
        def make(self):
            return MyAllocator          # called with an AllocatorContext

The suite asks for no more than `max_model_len` tokens a sequence, as the engine does, and does not
say how many blocks an allocator sets aside for a sequence beside those that its tokens are in. One
that sets none aside subclasses `BlocksOnDemandContract`, one whose blocks can be shared
`SharedBlocksContract`, one that pins `PinnedBlocksContract`; each includes the suite before it. Random
operations run against `PoolModel`, an allocator made of sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import (
    AllocatorContext,
    KVAllocator,
    PinnedBlocks,
    SharedBlocks,
    Verdict,
)
from pegboard.testing.kv_allocator_model import (
    AllocatorMachine,
    CacheOfBlocks,
    OnDemandMachine,
    PinMachine,
    SharingMachine,
)

MakeAllocator = Callable[[AllocatorContext], KVAllocator]

_SETTINGS = settings(
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def group(block_size: int, window: int | None = None, layer: int = 0) -> KVGroup:
    """A KV group of one layer."""
    return KVGroup((layer,), 1, 8, block_size, window, "none", "float32")


def context(
    groups: tuple[KVGroup, ...],
    num_blocks: tuple[int, ...],
    max_chunk: int = 64,
    max_model_len: int = 1024,
) -> AllocatorContext:
    """An allocator's context, with a cache that holds nothing."""
    return AllocatorContext(groups, num_blocks, max_model_len, max_chunk, CacheOfBlocks())


def _fails_half_way(change: Callable[[], object], allocator: KVAllocator) -> None:
    with pytest.raises(RuntimeError, match="half way"), allocator.transaction():
        change()
        raise RuntimeError("half way")


class KVAllocatorContract:
    """The contract of every allocator."""

    machine: type[AllocatorMachine] = AllocatorMachine

    @pytest.fixture
    def make(self) -> MakeAllocator:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    @pytest.fixture
    def pool(self, make: MakeAllocator) -> KVAllocator:
        """One group, ten blocks of four tokens to hand out: room for two of the longest sequences."""
        return make(context((group(4),), (11,), max_model_len=20))

    def test_random_operations_agree_with_sets(self, make: MakeAllocator) -> None:
        machine = self.machine

        class Machine(machine):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__(make)

        run_state_machine_as_test(Machine, settings=_SETTINGS)

    def test_all_blocks_but_block_zero_are_handed_out(self, pool: KVAllocator) -> None:
        growths = [pool.grow(1, 20), pool.grow(2, 20)]
        blocks = [
            block for growth in growths if growth is not None for _, block in growth.new_blocks[0]
        ]
        assert sorted(blocks) == list(range(1, 11))

    def test_growing_appends_and_repeating_changes_nothing(self, pool: KVAllocator) -> None:
        first = pool.grow(1, 5)
        assert first is not None and [entry for entry, _ in first.new_blocks[0]] == [0, 1]
        again = pool.grow(1, 5)
        assert again is not None and again.new_blocks == ((),) and again.copies == ((),)
        more = pool.grow(1, 9)
        assert more is not None and [entry for entry, _ in more.new_blocks[0]] == [2]

    def test_lookahead_makes_slots_beyond(self, pool: KVAllocator) -> None:
        growth = pool.grow(1, 4, lookahead=(1,))
        assert growth is not None and len(growth.new_blocks[0]) == 2

    def test_lookahead_is_of_each_group(self, make: MakeAllocator) -> None:
        pool = make(context((group(4), group(4, layer=1)), (11, 11), max_model_len=40))
        growth = pool.grow(1, 4, lookahead=(0, 5))
        assert growth is not None and [len(new) for new in growth.new_blocks] == [1, 3]
        pool.trim(1, 0, 4)
        growth = pool.grow(1, 5, lookahead=(4, 0))
        assert growth is not None and [len(new) for new in growth.new_blocks] == [2, 1]

    def test_all_groups_or_nothing(self, make: MakeAllocator) -> None:
        pool = make(context((group(4), group(4, layer=1)), (11, 6), max_model_len=20))
        assert pool.grow(1, 20) is not None
        before = pool.ledger()
        assert pool.grow(2, 20) is None
        assert pool.ledger() == before
        pool.release(1)
        assert [entry.free for entry in pool.ledger()] == [10, 5]
        assert pool.grow(2, 20) is not None

    def test_full_pool_refuses_and_changes_nothing(self, pool: KVAllocator) -> None:
        assert pool.grow(1, 20) is not None and pool.grow(2, 20) is not None
        before = pool.ledger()
        assert pool.grow(3, 1) is None
        assert pool.ledger() == before

    def test_probe_tells_now_later_never(self, pool: KVAllocator) -> None:
        assert pool.grow(1, 20) is not None
        now = pool.probe(20)
        assert now.verdict is Verdict.NOW and now.missing == (0,)
        assert pool.grow(2, 20) is not None
        later, never = pool.probe(20), pool.probe(41)
        assert later.verdict is Verdict.LATER and later.missing == (5,)
        assert never.verdict is Verdict.NEVER and never.total == (10,)

    def test_probe_counts_on_what_the_owner_has(self, pool: KVAllocator) -> None:
        assert pool.grow(1, 4) is not None and pool.grow(2, 20) is not None
        assert pool.probe(20, owner=1).verdict is Verdict.NOW

    def test_released_blocks_are_free_and_releasing_again_does_nothing(
        self, pool: KVAllocator
    ) -> None:
        assert pool.grow(1, 10) is not None and pool.grow(2, 10) is not None
        pool.release(1)
        pool.release(1)
        pool.release("nobody")
        (ledger,) = pool.ledger()
        assert (ledger.free + ledger.reserved, ledger.held, ledger.total) == (7, 3, 10)
        pool.release(2)
        assert pool.ledger()[0].free == 10

    def test_release_waits_for_the_fence(self, pool: KVAllocator) -> None:
        assert pool.grow(1, 20) is not None and pool.grow(2, 20) is not None
        pool.release(1, after_step=7)
        pool.fence(6)
        assert pool.ledger()[0].deferred == 5 and pool.grow(3, 1) is None
        pool.fence(7)
        assert pool.ledger()[0].free == 5 and pool.grow(3, 1) is not None

    def test_fence_frees_what_older_steps_held(self, pool: KVAllocator) -> None:
        assert pool.grow(1, 8) is not None and pool.grow(2, 8) is not None
        pool.release(1, after_step=3)
        pool.release(2, after_step=4)
        pool.fence(9)
        assert pool.ledger()[0].free == 10

    def test_trim_drops_rejected_drafts(self, pool: KVAllocator) -> None:
        assert pool.grow(1, 6, lookahead=(10,)) is not None
        pool.trim(1, 0, 7)
        assert pool.ledger()[0].held == 2
        growth = pool.grow(1, 9)
        assert growth is not None and [entry for entry, _ in growth.new_blocks[0]] == [2]

    def test_trim_keeps_the_beginning_without_a_window(self, pool: KVAllocator) -> None:
        assert pool.grow(1, 20) is not None
        pool.trim(1, 16, 20)
        assert pool.ledger()[0].held == 5

    def test_trim_drops_what_left_the_window(self, make: MakeAllocator) -> None:
        groups = group(4), group(4, window=6, layer=1)
        pool = make(context(groups, (11, 11), max_model_len=20))
        assert pool.grow(1, 20) is not None
        pool.trim(1, 11, 20)
        assert [entry.held for entry in pool.ledger()] == [5, 3]

    def test_a_window_group_serves_sequences_longer_than_its_pool(
        self, make: MakeAllocator
    ) -> None:
        pool = make(context((group(4, window=8),), (6,), max_chunk=4))
        assert pool.probe(400).verdict is not Verdict.NEVER
        for length in range(4, 404, 4):
            assert pool.grow(1, length) is not None, f"no room at {length} tokens"
            pool.trim(1, max(0, length - 8), length)

    def test_no_block_in_sight_of_a_window_is_handed_out_again(self, make: MakeAllocator) -> None:
        pool = make(context((group(4, window=6),), (6,), max_chunk=5))
        table: dict[int, int] = {}
        for length in range(5, 200, 5):
            growth = pool.grow(1, length)
            assert growth is not None
            table.update(growth.new_blocks[0])
            seen = range(max(0, length - 5 - 6 + 1) // 4, -(-length // 4))
            assert len({table[entry] for entry in seen}) == len(seen)
            pool.trim(1, max(0, length - 6 + 1), length)

    def test_a_failed_transaction_leaves_nothing(self, pool: KVAllocator) -> None:
        assert pool.grow(1, 10) is not None
        before = pool.ledger()
        for change in (
            lambda: pool.grow(2, 20),
            lambda: pool.grow(1, 20),
            lambda: pool.release(1),
            lambda: pool.release(1, after_step=5),
            lambda: pool.trim(1, 0, 3),
        ):
            _fails_half_way(change, pool)
            assert pool.ledger() == before
        growth = pool.grow(1, 13)
        assert growth is not None and [entry for entry, _ in growth.new_blocks[0]] == [3]

    def test_a_transaction_that_ends_well_holds(self, pool: KVAllocator) -> None:
        with pool.transaction():
            pool.grow(1, 8)
            pool.grow(2, 8)
            pool.release(1)
        (ledger,) = pool.ledger()
        assert (ledger.held, ledger.free + ledger.reserved) == (2, 8)


class BlocksOnDemandContract(KVAllocatorContract):
    """The contract of allocators that set nothing aside: a sequence takes the blocks of its tokens, and
    no others."""

    machine = OnDemandMachine

    @pytest.fixture
    def pool(self, make: MakeAllocator) -> KVAllocator:
        """One group, ten blocks of four tokens to hand out: room for one of the longest sequences."""
        return make(context((group(4),), (11,), max_model_len=40))

    def test_nothing_is_set_aside(self, pool: KVAllocator) -> None:
        assert pool.grow(1, 10) is not None
        (ledger,) = pool.ledger()
        assert (ledger.held, ledger.free, ledger.reserved) == (3, 7, 0)

    def test_one_sequence_can_have_all_blocks(self, pool: KVAllocator) -> None:
        assert pool.grow(1, 36) is not None
        assert pool.grow(2, 5) is None and pool.grow(2, 4) is not None

    def test_a_group_without_room_leaves_the_others_alone(self, make: MakeAllocator) -> None:
        pool = make(context((group(4), group(4, layer=1)), (11, 3)))
        assert pool.grow(1, 12) is None
        assert [entry.free for entry in pool.ledger()] == [10, 2]
        assert pool.grow(1, 8) is not None

    def test_probe_counts_the_blocks_that_tokens_need(self, pool: KVAllocator) -> None:
        assert pool.grow(1, 20) is not None
        now, later, never = pool.probe(20), pool.probe(40), pool.probe(41)
        assert now.verdict is Verdict.NOW and now.missing == (0,)
        assert later.verdict is Verdict.LATER and later.missing == (5,)
        assert never.verdict is Verdict.NEVER
        assert pool.probe(40, owner=1).verdict is Verdict.NOW


def _sharing(pool: KVAllocator) -> SharedBlocks:
    assert isinstance(pool, SharedBlocks), "promises `sharing` and does not implement SharedBlocks"
    return pool


class SharedBlocksContract(BlocksOnDemandContract):
    """The contract of allocators whose blocks can have several owners."""

    machine = SharingMachine

    def test_fork_shares_and_the_first_writer_copies(self, pool: KVAllocator) -> None:
        sharing = _sharing(pool)
        assert pool.grow(1, 6) is not None
        sharing.fork(1, 2, 6)
        shared = tuple(sharing.blocks(1)[0])
        assert tuple(sharing.blocks(2)[0]) == shared and pool.ledger()[0].held == 2
        growth = pool.grow(2, 7)
        assert growth is not None
        ((source, target),) = growth.copies[0]
        assert source == shared[1] and target not in shared
        assert tuple(sharing.blocks(2)[0]) == (shared[0], target)
        assert tuple(sharing.blocks(1)[0]) == shared
        alone = pool.grow(1, 7)
        assert alone is not None and alone.copies == ((),)

    def test_a_copy_needs_a_block(self, pool: KVAllocator) -> None:
        sharing = _sharing(pool)
        assert pool.grow(1, 6) is not None
        sharing.fork(1, 2, 6)
        assert pool.grow(3, 32) is not None
        assert pool.grow(2, 7) is None
        assert pool.probe(7, owner=2).verdict is Verdict.LATER

    def test_shared_blocks_outlive_one_owner(self, pool: KVAllocator) -> None:
        sharing = _sharing(pool)
        assert pool.grow(1, 8) is not None
        sharing.fork(1, 2, 8)
        pool.release(1)
        assert pool.ledger()[0].held == 2
        pool.release(2)
        assert pool.ledger()[0].free == 10

    def test_adopted_blocks_begin_the_sequence(self, pool: KVAllocator) -> None:
        sharing = _sharing(pool)
        assert pool.grow(1, 8) is not None
        blocks = tuple(sharing.blocks(1)[0])
        sharing.adopt(2, [blocks])
        growth = pool.grow(2, 9)
        assert growth is not None and growth.copies == ((),)
        assert [entry for entry, _ in growth.new_blocks[0]] == [2]
        assert tuple(sharing.blocks(2)[0])[:2] == blocks

    def test_adopting_a_free_block_or_twice_is_refused(self, pool: KVAllocator) -> None:
        sharing = _sharing(pool)
        assert pool.grow(1, 4) is not None
        with pytest.raises(ValueError):
            sharing.adopt(1, [sharing.blocks(1)[0]])
        (block,) = sharing.blocks(1)[0]
        pool.release(1)
        with pytest.raises(ValueError):
            sharing.adopt(2, [[block]])
        assert pool.ledger()[0].free == 10

    def test_the_cache_keeps_blocks_until_they_are_needed(self, make: MakeAllocator) -> None:
        cache = CacheOfBlocks()
        pool = make(AllocatorContext((group(4),), (11,), 1024, 64, cache))
        sharing = _sharing(pool)
        assert pool.grow(1, 20) is not None
        for block in tuple(sharing.blocks(1)[0]):
            sharing.retain(0, block)
            cache.names.append((0, block))
        pool.release(1)
        ledger = pool.ledger()[0]
        assert (ledger.cached, ledger.free, ledger.held) == (5, 5, 0)
        assert pool.probe(40).verdict is Verdict.NOW
        growth = pool.grow(2, 32)
        assert growth is not None and len({block for _, block in growth.new_blocks[0]}) == 8
        ledger = pool.ledger()[0]
        assert (ledger.held, ledger.cached + ledger.free) == (8, 2)

    def test_forgotten_blocks_are_free(self, pool: KVAllocator) -> None:
        sharing = _sharing(pool)
        assert pool.grow(1, 4) is not None
        (block,) = sharing.blocks(1)[0]
        sharing.retain(0, block)
        pool.release(1)
        assert pool.ledger()[0].cached == 1
        sharing.forget(0, block)
        assert pool.ledger()[0].free == 10

    def test_forks_and_adoptions_roll_back(self, pool: KVAllocator) -> None:
        sharing = _sharing(pool)
        assert pool.grow(1, 8) is not None
        blocks = tuple(sharing.blocks(1)[0])
        before = pool.ledger()
        for change in (
            lambda: sharing.fork(1, 2, 6),
            lambda: sharing.adopt(2, [blocks]),
            lambda: sharing.retain(0, blocks[0]),
        ):
            _fails_half_way(change, pool)
            assert pool.ledger() == before and tuple(sharing.blocks(1)[0]) == blocks
        sharing.adopt(2, [blocks])


class PinnedBlocksContract(SharedBlocksContract):
    """The contract of allocators that serve KV transfers."""

    machine = PinMachine

    def test_pinned_blocks_outlive_their_sequence(self, pool: KVAllocator) -> None:
        pinning = cast(PinnedBlocks, pool)
        assert pool.grow(1, 8) is not None
        blocks = tuple(pinning.pin("export", 1, deadline=10.0)[0])
        assert blocks == tuple(_sharing(pool).blocks(1)[0])
        pool.release(1)
        assert (pool.ledger()[0].pinned, pool.ledger()[0].free) == (2, 8)
        pinning.unpin("export")
        pinning.unpin("export")
        assert pool.ledger()[0].free == 10

    def test_pins_end_at_their_deadline(self, pool: KVAllocator) -> None:
        pinning = cast(PinnedBlocks, pool)
        assert pool.grow(1, 4) is not None and pool.grow(2, 4) is not None
        pinning.pin("early", 1, deadline=10.0)
        pinning.pin("late", 2, deadline=20.0)
        pool.release(1)
        pool.release(2)
        assert pinning.expire(9.0) == ()
        assert pinning.expire(11.0) == ("early",)
        assert (pool.ledger()[0].pinned, pool.ledger()[0].free) == (1, 9)

    def test_pinned_blocks_are_not_written_to(self, pool: KVAllocator) -> None:
        pinning = cast(PinnedBlocks, pool)
        assert pool.grow(1, 6) is not None
        blocks = tuple(pinning.pin("export", 1, deadline=10.0)[0])
        growth = pool.grow(1, 7)
        assert growth is not None
        assert [source for source, _ in growth.copies[0]] == [blocks[1]]
