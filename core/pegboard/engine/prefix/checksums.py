"""A debug mode: whether the KV of a block is still what it was when the block was filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pegboard.engine.prefix.known_blocks import KnownBlocks
from pegboard.interfaces.executor import Executor
from pegboard.interfaces.prefix_cache import Hit

QUESTION = "block_checksums"
"""What the workers are asked, with a group and its blocks: a number for each block."""


class BlockChecksums:
    """Compares the checksums of known blocks with what the workers that hold them say now.

    A block that has changed is not served again before it is handed out anew; `on_change` is told.
    """

    def __init__(
        self, known: KnownBlocks, executor: Executor, on_change: Callable[[str], None]
    ) -> None:
        self._known = known
        self._executor = executor
        self._on_change = on_change

    def note(self, group: int, blocks: Sequence[int]) -> None:
        """These blocks have just been filled."""
        for block, checksum in zip(blocks, self._ask(group, blocks), strict=True):
            self._known.row(group, block).checksum = checksum

    def distrusts(self, hit: Hit) -> bool:
        """Whether a block of the hit was found changed; 0: the window does without it."""
        return any(
            block and self._known.row(group, block).has_changed
            for group, blocks in enumerate(hit.blocks)
            for block in blocks
        )

    def confirm(self, blocks: Sequence[Sequence[int]]) -> bool:
        """Asks the workers whether the blocks, a group, hold what they held."""
        changed = [
            (group, block)
            for group, ids in enumerate(blocks)
            for block in self._changed(group, ids)
        ]
        for group, block in changed:
            self._on_change(f"block {block} of group {group} is not what it was when it was named")
        return not changed

    def _changed(self, group: int, blocks: Sequence[int]) -> list[int]:
        changed = []
        held = [block for block in blocks if block]
        for block, checksum in zip(held, self._ask(group, held), strict=True):
            row = self._known.row(group, block)
            if row.checksum != checksum:
                row.has_changed = True
                changed.append(block)
        return changed

    def _ask(self, group: int, blocks: Sequence[int]) -> list[tuple[int, ...]]:
        """For each block a number a rank."""
        if not blocks:
            return []
        return list(zip(*self._executor.call(QUESTION, group, blocks), strict=True))
