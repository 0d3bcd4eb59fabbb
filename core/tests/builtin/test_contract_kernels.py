"""The built-in kernels keep their contracts: what the factory makes, as engines get it."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from pegboard.builtin.torch_kernels import torch_kernel
from pegboard.testing.kernels import (
    KernelContract,
    LinearContract,
    MakeKernel,
    RMSNormContract,
    RotaryContract,
    SiluMulContract,
)
from pegboard.testing.sample import ProbabilitiesContract, SampleContract

DTYPES = ("float32", "float64", "bfloat16", "float16")


class Torch(KernelContract):
    """Made by the plugin's factory, which picks by operation and device."""

    dtypes: ClassVar[tuple[str, ...]] = DTYPES

    @pytest.fixture
    def make(self) -> MakeKernel:
        return torch_kernel


class TestLinear(Torch, LinearContract):
    pass


class TestLinearOnCodes(Torch, LinearContract):
    formats = ("int8", "uint4", "float8", "float8:dynamic", "float8:static")
    dtypes = ("float32", "float64", "bfloat16")


class TestLinearOfIntegers(Torch, LinearContract):
    formats = ("int8:dynamic", "int8:static", "int8:grouped", "uint4:grouped")
    dtypes = ("float32", "bfloat16")
    row_invariant = True


class TestRMSNorm(Torch, RMSNormContract):
    pass


class TestRotary(Torch, RotaryContract):
    pass


class TestSiluMul(Torch, SiluMulContract):
    pass


class TestSample(Torch, SampleContract):
    dtypes = ("float32",)


class TestProbabilities(Torch, ProbabilitiesContract):
    dtypes = ("float32",)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestLinearOnCuda(TestLinear):
    device = "cuda"
