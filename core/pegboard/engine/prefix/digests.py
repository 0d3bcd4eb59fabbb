"""Digests of a sequence's first blocks, by which a block with the same content is found."""

from __future__ import annotations

from hashlib import blake2b

from pegboard.engine.sequence import Sequence

DIGEST_BYTES = 16


def digests_of(seq: Sequence, block_size: int, count: int) -> list[bytes]:
    """Digests of the sequence's tokens up to the end of each block, at least the first `count`: each is
    of the one before it and its block's tokens, the first one's is the salt's."""
    digests = seq.digests.setdefault(block_size, [])
    if len(digests) < count:
        tokens = seq.token_ids
        num_bytes, data = block_size * tokens.itemsize, tokens.data.cast("B")
        before = digests[-1] if digests else blake2b(seq.salt.encode()).digest()
        for start in range(len(digests) * num_bytes, count * num_bytes, num_bytes):
            block = data[start : start + num_bytes]
            before = blake2b(before + block, digest_size=DIGEST_BYTES).digest()
            digests.append(before)
    return digests
