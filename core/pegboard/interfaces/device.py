"""What is known of the machine before anything is resolved, read without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device, or several of one kind.

    Attributes:
        kind: `cpu` or `cuda`.
        name: as people call it.
        count: how many.
        total_bytes: memory of one; of a CPU, the cgroup's limit if it is lower than the machine's.
        available_bytes: of it, free now.
        num_threads: cores that this process may use.
        features: `avx2`, `avx512f`, `triton_interpreter`, ...
        capability: CUDA compute capability, `major.minor`; "" otherwise.
    """

    kind: str
    name: str
    count: int
    total_bytes: int
    available_bytes: int
    num_threads: int = 1
    features: frozenset[str] = frozenset()
    capability: str = ""
