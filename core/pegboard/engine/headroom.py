"""The blocks that must stay free when a sequence is admitted, so that the pool does not thrash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import KVAllocator


def has_headroom(
    allocator: KVAllocator,
    groups: Sequence[KVGroup],
    num_running: int,
    running: Iterable[tuple[int, int]],
) -> bool:
    """Whether each group has a block left for each running sequence that may still ask for one.

    A newcomer that takes the last blocks would be preempted as soon as running sequences grow, and its
    work lost. Blocks that were set aside count as room: their sequences need no others.

    Args:
        running: of each, the slots that it has or has reserved, and the most that it can come to.
    """
    room = [ledger.free + ledger.cached + ledger.reserved for ledger in allocator.ledger()]
    if min(room) >= num_running:
        return True
    slots = list(running)
    for group, num_blocks in zip(groups, room, strict=True):
        size = group.block_size
        if num_blocks < sum(-(-most // size) > -(-now // size) for now, most in slots):
            return False
    return True
