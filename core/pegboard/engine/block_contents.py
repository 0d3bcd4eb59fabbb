"""What each block holds, as the engine itself knows it: the check on what a prefix cache says."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import Growth
from pegboard.interfaces.prefix_cache import Hit

if TYPE_CHECKING:
    from pegboard.engine.sequence import Sequence as EngineSequence

DIGEST_BYTES = 16


class BlockContents:
    """A digest of all tokens up to a block's end, for each block that a forward has completed.

    It is noted when the tokens are committed and dropped when the block is handed out again, so a block
    with the right digest holds the right KV, whatever a cache may say.
    """

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self._groups = groups
        self._digests: dict[tuple[int, int], bytes] = {}

    def note(self, seq: EngineSequence, group: int, blocks: Sequence[int], first: int) -> None:
        """The blocks from the `first` on are complete; 0: the window gave one back."""
        digests = seq.prefix_digests(self._groups[group].block_size, len(blocks))
        for entry in range(first, len(blocks)):
            if blocks[entry]:
                self._digests[group, blocks[entry]] = digests[entry]

    def digest(self, group: int, block: int) -> bytes | None:
        """Of what the block holds; None: nothing that is known."""
        return self._digests.get((group, block))

    def clear(self) -> None:
        """Nothing computed so far may be found again."""
        self._digests.clear()

    def drop(self, growth: Growth) -> bool:
        """These blocks are handed out, and will be written to. Returns whether one held anything."""
        held = False
        for group, slots in enumerate(growth.slots):
            for _, block in slots:
                held |= self._digests.pop((group, block), None) is not None
        return held

    def confirm(self, seq: EngineSequence, hit: Hit, limit: int) -> bool:
        """Whether the hit's blocks hold the sequence's first tokens, at most `limit` of them."""
        return (
            0 < hit.num_tokens <= limit
            and len(hit.blocks) == len(self._groups)
            and all(self._holds(seq, group, hit) for group in range(len(self._groups)))
        )

    def _holds(self, seq: EngineSequence, group: int, hit: Hit) -> bool:
        size = self._groups[group].block_size
        blocks = hit.blocks[group]
        if hit.num_tokens % size or len(blocks) * size != hit.num_tokens:
            return False
        digests = seq.prefix_digests(size, len(blocks))
        unseen = num_unseen_blocks(self._groups[group], hit.num_tokens)
        return all(
            (block == 0 and entry < unseen) or self._digests.get((group, block)) == digest
            for entry, (block, digest) in enumerate(zip(blocks, digests, strict=False))
        )


def num_unseen_blocks(group: KVGroup, num_tokens: int) -> int:
    """Blocks at the beginning that no token after the first `num_tokens` attends to."""
    if group.window is None:
        return 0
    return max(0, num_tokens - group.window + 1) // group.block_size


def extend_digests(
    digests: list[bytes], tokens: memoryview, block_bytes: int, count: int, salt: str
) -> None:
    """Appends until there are `count` digests, each of the one before it and its block's tokens; the
    first one's is the salt's."""
    while len(digests) < count:
        start = len(digests) * block_bytes
        before = digests[-1] if digests else blake2b(salt.encode()).digest()
        block = tokens[start : start + block_bytes]
        digests.append(blake2b(before + block, digest_size=DIGEST_BYTES).digest())
