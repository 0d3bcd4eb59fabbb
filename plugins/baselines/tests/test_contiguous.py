"""The contiguous allocator: runs, what is reserved, and what that keeps others from having."""

from __future__ import annotations

from pegboard.interfaces.kv_allocator import AllocatorContext, Growth, Verdict
from pegboard.testing.kv_allocator import context, group
from pegboard_baselines.contiguous import ContiguousAllocator


def _pool(num_blocks: int, max_model_len: int = 16) -> ContiguousAllocator:
    """One group of blocks of four tokens."""
    return ContiguousAllocator(context((group(4),), (1 + num_blocks,), 64, max_model_len))


def _blocks(*growths: Growth | None) -> list[int]:
    return [block for growth in growths if growth is not None for _, block in growth.new_blocks[0]]


def test_a_sequence_stays_in_consecutive_blocks_however_others_grow() -> None:
    pool = _pool(12)
    growths: dict[int, list[Growth | None]] = {owner: [] for owner in (1, 2, 3)}
    for num_tokens in range(1, 17):
        for owner, grown in growths.items():
            grown.append(pool.grow(owner, num_tokens))
    for grown in growths.values():
        blocks = _blocks(*grown)
        assert blocks == list(range(blocks[0], blocks[0] + 4))


def test_the_first_run_that_is_free_is_taken() -> None:
    pool = _pool(12)
    first, second = _blocks(pool.grow(1, 16)), _blocks(pool.grow(2, 16))
    pool.grow(3, 1)
    pool.release(2)
    pool.release(1)
    assert _blocks(pool.grow(4, 16)) == first
    assert _blocks(pool.grow(5, 16)) == second


def test_what_tokens_do_not_use_is_reserved() -> None:
    pool = _pool(10)
    pool.grow(1, 5)
    (ledger,) = pool.ledger()
    assert (ledger.held, ledger.reserved, ledger.free) == (2, 2, 6)
    pool.grow(1, 16)
    (ledger,) = pool.ledger()
    assert (ledger.held, ledger.reserved, ledger.free) == (4, 0, 6)


def test_blocks_that_are_free_in_total_and_make_no_run_help_nobody() -> None:
    pool = _pool(10)
    pool.grow(1, 4)
    pool.grow(2, 4)
    (ledger,) = pool.ledger()
    assert (ledger.held, ledger.reserved, ledger.free) == (2, 6, 2)
    assert pool.probe(8).verdict is Verdict.LATER, "two blocks are free, and eight not written to"
    assert pool.grow(3, 8) is None
    pool.release(1)
    assert pool.grow(3, 8) is not None


def test_a_released_run_waits_whole_for_the_step_in_flight() -> None:
    pool = _pool(4)
    pool.grow(1, 3)
    pool.release(1, after_step=2)
    assert pool.ledger()[0].deferred == 4 and pool.grow(2, 1) is None
    pool.fence(2)
    assert pool.grow(2, 1) is not None


def test_a_pool_shorter_than_a_run_serves_nobody() -> None:
    assert _pool(3).probe(1).verdict is Verdict.NEVER
    assert _pool(3).grow(1, 1) is None


def test_a_window_group_gets_a_ring_for_the_window_and_a_chunk() -> None:
    groups = group(4), group(4, window=8, layer=1)
    cache = context(groups, (1, 1)).cache
    pool = ContiguousAllocator(AllocatorContext(groups, (33, 11), 64, 4, cache))
    for owner in (1, 2):
        table: dict[int, int] = {}
        for length in range(4, 65, 4):
            growth = pool.grow(owner, length)
            assert growth is not None
            table.update(growth.new_blocks[1])
            pool.trim(owner, max(0, length - 8 + 1), length)
        assert len(set(table.values())) == 4 < len(table)
    full, windowed = pool.ledger()
    assert (full.held, full.free) == (32, 0)
    assert (windowed.held + windowed.reserved, windowed.free) == (8, 2)
