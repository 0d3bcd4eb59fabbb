"""Facts of the machine, read without torch before anything is resolved."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = {
    "cpu": ("float32", "bfloat16", "float16", "float64"),
    "cuda": ("bfloat16", "float16", "float32"),
}
"""Activation dtypes of each kind of device."""

CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "amx_tile", "neon", "asimd")
"""Instruction sets that a CPU may have, as Linux names them."""

DEVICE_FEATURES = (*CPU_FEATURES, "triton_interpreter")
"""Features that a device may have. `triton_interpreter`: the CPU runs Triton's kernels one by one in
Python, as TRITON_INTERPRET=1 asks."""


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
        features: those of `DEVICE_FEATURES` that it has.
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
