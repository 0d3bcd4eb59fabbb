"""A debug mode: looks for blocks whose KV has changed since they were filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pegboard.engine.prefix.known_blocks import KnownBlocks
from pegboard.interfaces.executor import Executor
from pegboard.interfaces.prefix_cache import Hit

QUESTION = "block_checksums"
"""The question to the workers, with a group and blocks of it. The answer is a number for each block."""


class BlockChecksums:
    """Compares the checksums of known blocks with new ones, which the workers compute.

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
            self._known.get(group, block).checksum = checksum

    def distrusts(self, hit: Hit) -> bool:
        """Whether a block of the hit was found changed; 0: the window does without it."""
        return any(
            block and self._known.get(group, block).has_changed
            for group, blocks in enumerate(hit.blocks)
            for block in blocks
        )

    def confirm(self, blocks: Sequence[Sequence[int]]) -> bool:
        """Asks the workers whether the KV of the blocks, a group, is unchanged."""
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
            known = self._known.get(group, block)
            if known.checksum != checksum:
                known.has_changed = True
                changed.append(block)
        return changed

    def _ask(self, group: int, blocks: Sequence[int]) -> list[tuple[int, ...]]:
        """For each block a number a rank."""
        if not blocks:
            return []
        return list(zip(*self._executor.call(QUESTION, group, blocks), strict=True))
