"""Memory for packed weights."""

from __future__ import annotations

import mmap

import torch

_REGION_BYTES = 64 << 20
_LINE_BYTES = 64


class HugePages:
    """Memory for weights on huge pages where the system has them: looking up the addresses of
    small ones takes a third of the time of a product of few rows.

    A weight may be smaller than a page, so they share regions. What is not used yet of a region
    takes addresses and no memory; a region lives as long as a tensor in it.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], at the start of a cache line."""
        taken = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        if taken > self._free.shape[0]:
            self._free = self._region(max(_REGION_BYTES, 4 * taken))
        tensor, self._free = self._free[:num_bytes], self._free[taken:]
        return tensor

    def _region(self, num_bytes: int) -> torch.Tensor:
        # shared memory, which is mmap's default, gets no huge pages
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)
