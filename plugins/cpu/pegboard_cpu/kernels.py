"""The kernel of each operation."""

from __future__ import annotations

from collections.abc import Callable

from pegboard.interfaces.kernel import Kernel, KernelContext
from pegboard_cpu.codes import CPUCodes
from pegboard_cpu.decoder_layer import CPUDecoderLayer
from pegboard_cpu.elementwise import CPURMSNorm, CPURotary, CPUSiluMul
from pegboard_cpu.float8 import CPUFloat8
from pegboard_cpu.linear import CPULinear
from pegboard_cpu.sample import CPUSample
from pegboard_cpu.w8a8 import CPUW8A8

_LINEAR: dict[str, Callable[[KernelContext], Kernel]] = {
    "float": CPULinear,
    "uint4": CPUCodes,
    "uint4:grouped": CPUCodes,
    "int8": CPUCodes,
    "int8:grouped": CPUCodes,
    "int8:dynamic": CPUW8A8,
    "int8:static": CPUW8A8,
    "float8": CPUFloat8,
    "float8:dynamic": CPUFloat8,
    "float8:static": CPUFloat8,
}
"""The kernels by weight format."""

_KERNELS: dict[str, Callable[[KernelContext], Kernel]] = {
    "linear": lambda context: _LINEAR[context.format](context),
    "rms_norm": CPURMSNorm,
    "rotary": CPURotary,
    "silu_mul": CPUSiluMul,
    "sample": CPUSample,
    "decoder_layer": CPUDecoderLayer,
}


def cpu_kernel(context: KernelContext) -> Kernel:
    """The kernel of an operation with float32 activations, on a CPU."""
    return _KERNELS[context.operation](context)
