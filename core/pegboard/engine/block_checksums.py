"""A debug mode: whether the KV of a block is still what it was when the block was named."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pegboard.interfaces.executor import Executor
from pegboard.interfaces.kv_allocator import Growth
from pegboard.interfaces.prefix_cache import Hit

QUESTION = "block_checksums"
"""What the workers are asked, with a group and its blocks: a number for each block."""

Checksum = tuple[int, ...]
"""Of one block, a number a rank."""


class BlockChecksums:
    """Checksums of the blocks that the prefix cache was told of, by the workers that hold them.

    A block that has changed is not served again before it is handed out anew; `on_change` is told.
    """

    def __init__(self, executor: Executor, on_change: Callable[[str], None]) -> None:
        self._executor = executor
        self._on_change = on_change
        self._known: dict[tuple[int, int], Checksum] = {}
        self._changed: set[tuple[int, int]] = set()

    def note(self, group: int, blocks: Sequence[int]) -> None:
        """These blocks are complete; 0: the window gave one back."""
        held = [block for block in blocks if block]
        for block, checksum in zip(held, self._ask(group, held), strict=True):
            self._known[group, block] = checksum

    def drop(self, growth: Growth) -> None:
        """These blocks are handed out, and will be written to."""
        for group, slots in enumerate(growth.slots):
            for _, block in slots:
                self._known.pop((group, block), None)
                self._changed.discard((group, block))

    def distrusts(self, hit: Hit) -> bool:
        """Whether a block of the hit was found changed."""
        return any(
            (group, block) in self._changed
            for group, blocks in enumerate(hit.blocks if self._changed else ())
            for block in blocks
        )

    def confirm(self, blocks: Sequence[Sequence[int]]) -> bool:
        """Asks the workers whether the blocks, a group, hold what they held."""
        differing = [
            (group, block)
            for group, ids in enumerate(blocks)
            for block in self._differing(group, ids)
        ]
        self._changed.update(differing)
        for group, block in differing:
            self._on_change(f"block {block} of group {group} is not what it was when it was named")
        return not differing

    def clear(self) -> None:
        """All names are forgotten."""
        self._known.clear()
        self._changed.clear()

    def _differing(self, group: int, blocks: Sequence[int]) -> list[int]:
        held = [block for block in blocks if block]
        now = self._ask(group, held)
        return [
            block
            for block, checksum in zip(held, now, strict=True)
            if self._known.get((group, block)) != checksum
        ]

    def _ask(self, group: int, blocks: Sequence[int]) -> list[Checksum]:
        if not blocks:
            return []
        return list(zip(*self._executor.call(QUESTION, group, blocks), strict=True))
