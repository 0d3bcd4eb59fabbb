"""The built-in kernels keep their contracts."""

from __future__ import annotations

import pytest

from pegboard.builtin.torch_kernels import (
    TorchLinear,
    TorchPanelLinear,
    TorchRMSNorm,
    TorchRotary,
    TorchSiluMul,
)
from pegboard.builtin.torch_sampler import TorchSample
from pegboard.testing.kernels import (
    LinearContract,
    MakeKernel,
    RMSNormContract,
    RotaryContract,
    SiluMulContract,
)
from pegboard.testing.sample import SampleContract

DTYPES = ("float32", "float64", "bfloat16", "float16")


class TestTorchLinear(LinearContract):
    dtypes = DTYPES

    @pytest.fixture
    def make(self) -> MakeKernel:
        return TorchLinear


class TestTorchPanelLinear(LinearContract):
    dtypes = DTYPES

    @pytest.fixture
    def make(self) -> MakeKernel:
        return TorchPanelLinear


class TestTorchRMSNorm(RMSNormContract):
    dtypes = DTYPES

    @pytest.fixture
    def make(self) -> MakeKernel:
        return TorchRMSNorm


class TestTorchRotary(RotaryContract):
    dtypes = DTYPES

    @pytest.fixture
    def make(self) -> MakeKernel:
        return TorchRotary


class TestTorchSiluMul(SiluMulContract):
    dtypes = DTYPES

    @pytest.fixture
    def make(self) -> MakeKernel:
        return TorchSiluMul


class TestTorchSample(SampleContract):
    @pytest.fixture
    def make(self) -> MakeKernel:
        return TorchSample
