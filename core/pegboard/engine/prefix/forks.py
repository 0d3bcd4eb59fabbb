"""Several sequences of one request: its prompt is computed once, and the others begin with copies."""

from __future__ import annotations

from collections.abc import Container

from pegboard.engine.sequence import Sequence
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import KVAllocator, SharedBlocks
from pegboard.interfaces.prefix_cache import Hit


class Forks:
    """Begins sequences with the blocks of a running sibling. Full blocks stay shared; the one that the
    prompt ends in is copied before it is written to.

    Attributes:
        blocks: the allocator's side that shares blocks; None: it has none, and nothing is forked.
    """

    def __init__(self, allocator: KVAllocator, groups: tuple[KVGroup, ...]) -> None:
        self.blocks = allocator if isinstance(allocator, SharedBlocks) else None
        self._groups = groups
        self._has_windows = any(group.window is not None for group in groups)

    def parent(self, seq: Sequence, preempted: Container[int]) -> Sequence | None:
        """A running sibling of a waiting sequence that has all of the prompt but its last token, whose
        logits each needs for itself.

        Args:
            preempted: ids of those that the step being planned has preempted: their blocks are gone.
        """
        if not self.may_fork(seq):
            return None
        for sibling in seq.owner.sequences:
            if (
                sibling.row is not None
                and sibling.num_computed >= seq.num_prompt - 1
                and sibling.seq_id not in preempted
                and not sibling.is_outdated
                and self._has_window(sibling, seq.num_prompt - 1)
            ):
                return sibling
        return None

    def may_fork(self, seq: Sequence) -> bool:
        """Whether the sequence can begin as a sibling's copy, once there is one."""
        return self.blocks is not None and len(seq.owner.sequences) > 1 and seq.num_prompt > 1

    def fork(self, parent: Sequence, seq: Sequence) -> Hit:
        """Makes the sequence an owner that begins with the prompt but for its last token. The blocks
        of the hit are the full ones; the rest comes as its growth."""
        assert self.blocks is not None
        num_tokens = seq.num_prompt - 1
        self.blocks.fork(parent.seq_id, seq.seq_id, num_tokens)
        tables = self.blocks.blocks(seq.seq_id)
        return Hit(
            num_tokens,
            tuple(
                table[: num_tokens // group.block_size]
                for table, group in zip(tables, self._groups, strict=True)
            ),
        )

    def _has_window(self, parent: Sequence, num_tokens: int) -> bool:
        """Whether nothing has left a window that the next token attends to."""
        if not self._has_windows:
            return True
        assert self.blocks is not None
        return all(
            all(table[num_unseen_blocks(group, num_tokens) : -(-num_tokens // group.block_size)])
            for table, group in zip(self.blocks.blocks(parent.seq_id), self._groups, strict=True)
        )


def num_unseen_blocks(group: KVGroup, num_tokens: int) -> int:
    """Blocks at the beginning that no token after the first `num_tokens` attends to."""
    if group.window is None:
        return 0
    return max(0, num_tokens - group.window + 1) // group.block_size
