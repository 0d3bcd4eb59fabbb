"""Native kernels for CPUs, for Pegboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard import hookimpl

if TYPE_CHECKING:
    from pegboard.interfaces.attention import AttentionBackend, AttentionContext
    from pegboard.interfaces.kernel import Kernel, KernelContext


@hookimpl
def pegboard_kernels() -> dict[str, Callable[[KernelContext], Kernel]]:
    return {"cpu": _make_kernel}


@hookimpl
def pegboard_attention_backends() -> dict[str, Callable[[AttentionContext], AttentionBackend]]:
    return {"cpu": _make_attention}


def _make_kernel(context: KernelContext) -> Kernel:
    from pegboard_cpu.kernels import cpu_kernel

    return cpu_kernel(context)


def _make_attention(context: AttentionContext) -> AttentionBackend:
    from pegboard_cpu.attention import CPUAttention

    return CPUAttention(context)
