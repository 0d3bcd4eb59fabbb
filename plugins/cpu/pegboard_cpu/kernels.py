"""The kernel of each operation."""

from __future__ import annotations

from collections.abc import Callable

from pegboard.interfaces.kernel import Kernel, KernelContext
from pegboard_cpu.decoder_layer import CPUDecoderLayer
from pegboard_cpu.elementwise import CPURMSNorm, CPURotary, CPUSiluMul
from pegboard_cpu.linear import CPULinear
from pegboard_cpu.sample import CPUSample

_KERNELS: dict[str, Callable[[KernelContext], Kernel]] = {
    "linear": CPULinear,
    "rms_norm": CPURMSNorm,
    "rotary": CPURotary,
    "silu_mul": CPUSiluMul,
    "sample": CPUSample,
    "decoder_layer": CPUDecoderLayer,
}


def cpu_kernel(context: KernelContext) -> Kernel:
    """The kernel of an operation: float32, on a CPU."""
    return _KERNELS[context.operation](context)
