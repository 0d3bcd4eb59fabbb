"""The small operations keep their contracts."""

from __future__ import annotations

from typing import ClassVar

import pytest

from pegboard.testing.attention import MakeBackend
from pegboard.testing.decoder_layer import DecoderLayerContract
from pegboard.testing.kernels import (
    KernelContract,
    MakeKernel,
    RMSNormContract,
    RotaryContract,
    SiluMulContract,
)
from pegboard.testing.sample import SampleContract
from pegboard_cpu.attention import CPUAttention
from pegboard_cpu.attention_layout import layout
from pegboard_cpu.kernels import cpu_kernel


class CPU(KernelContract):
    """Made by the plugin's factory, which picks by operation."""

    row_invariant: ClassVar[bool] = True

    @pytest.fixture
    def make(self) -> MakeKernel:
        return cpu_kernel


class TestRMSNorm(CPU, RMSNormContract):
    pass


class TestRotary(CPU, RotaryContract):
    pass


class TestSiluMul(CPU, SiluMulContract):
    pass


class TestSample(CPU, SampleContract):
    pass


class CPUDecoderLayers(CPU, DecoderLayerContract):
    layout = staticmethod(layout)

    @pytest.fixture
    def make_attention(self) -> MakeBackend:
        return CPUAttention


class TestDecoderLayer(CPUDecoderLayers):
    pass


class TestDecoderLayerOfCodes(CPUDecoderLayers):
    formats: ClassVar[tuple[str, ...]] = ("uint4:grouped", "int8:dynamic", "int8:static")


class TestDecoderLayerOfFloat8(CPUDecoderLayers):
    formats: ClassVar[tuple[str, ...]] = ("float8", "float8:dynamic", "float8:static")
