"""The reference kernels in plain torch, to be read beside the formula; any device and dtype.

None promises `row_invariant`: a float32 product on a CPU sums in an order that changes with the
number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch.nn import functional as F

from pegboard.builtin.torch_sampler import TorchSample
from pegboard.interfaces.kernel import (
    Kernel,
    KernelContext,
    LinearKernel,
    PackedWeight,
    RMSNormKernel,
    RotaryKernel,
    SiluMulKernel,
)
from pegboard.interfaces.quantizer import LinearWeight


def torch_kernel(context: KernelContext) -> Kernel:
    """The kernel of an operation, format `float`."""
    return _KERNELS[context.operation](context)


class TorchLinear(LinearKernel):
    """y = x·Wᵀ; a packed weight is a tensor [out_features, in_features]."""

    gathers = True

    def __init__(self, context: KernelContext) -> None:
        self._dtype: torch.dtype = getattr(torch, context.activation_dtype)
        self._device = torch.device(context.device)

    def prepare(self, weight: LinearWeight) -> PackedWeight:
        assert weight.values is not None, f"a weight of format {weight.format} has no values"
        return PackedWeight(weight.values.to(self._device, self._dtype))

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        return F.linear(x, cast(torch.Tensor, weight))

    def gather_rows(self, weight: PackedWeight, row_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(row_ids, cast(torch.Tensor, weight))

    def self_test(self) -> None:
        tile = self._tensor([[1, 2, 3], [4, 5, 6]])
        weight = self.prepare(LinearWeight("float", (2, 3), values=tile))
        _expect(self.linear(self._tensor([[1, 0, -1]]), weight), [[-2, -2]])
        row_ids = torch.tensor([1], device=self._device)
        _expect(self.gather_rows(weight, row_ids), [[4, 5, 6]])

    def _tensor(self, values: list[list[float]]) -> torch.Tensor:
        return torch.tensor(values, dtype=self._dtype, device=self._device)


class TorchRMSNorm(RMSNormKernel):
    """x / sqrt(mean(x²) + eps) * weight; rounded to the activation dtype before the weight, as the
    models were trained."""

    def __init__(self, context: KernelContext) -> None:
        self._dtype: torch.dtype = getattr(torch, context.activation_dtype)
        self._device = torch.device(context.device)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(_wide(x.dtype))
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def self_test(self) -> None:
        def row(*values: float) -> torch.Tensor:
            return torch.tensor([values], dtype=self._dtype, device=self._device)

        # the root of the mean of 1, 1, 49, 49 is 5
        normed, total = self.add_rms_norm(
            row(1, 0, 3, 7), row(0, 1, 4, 0), row(5, 10, 5, 5)[0], 0.0
        )
        _expect(normed, [[1, 2, 7, 7]])
        _expect(total, [[1, 1, 7, 7]])


class TorchRotary(RotaryKernel):
    """(a, b) -> (a·cos - b·sin, b·cos + a·sin) for the pairs of a head's two halves."""

    def __init__(self, context: KernelContext) -> None:
        self._dtype: torch.dtype = getattr(torch, context.activation_dtype)
        self._device = torch.device(context.device)

    def rotate(
        self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        half = cos.shape[-1]
        c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        a, b = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype)
        rotated = torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)
        return torch.cat((rotated, x[..., 2 * half :]), dim=-1)

    def self_test(self) -> None:
        x = torch.tensor([[[1, 2, 3, 4, 9]]], dtype=self._dtype, device=self._device)
        # at position 1 the first pair turns by a quarter, the second not at all
        cos = torch.tensor([[1.0, 1.0], [0.0, 1.0]], device=self._device)
        sin = torch.tensor([[0.0, 0.0], [1.0, 0.0]], device=self._device)
        position = torch.tensor([1], device=self._device)
        _expect(self.rotate(x, position, cos, sin), [[[-3, 2, 1, 4, 9]]])


class TorchSiluMul(SiluMulKernel):
    """gate / (1 + exp(-gate)) * up."""

    def __init__(self, context: KernelContext) -> None:
        self._dtype: torch.dtype = getattr(torch, context.activation_dtype)
        self._device = torch.device(context.device)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate, inplace=True).mul_(up)

    def self_test(self) -> None:
        def row(*values: float) -> torch.Tensor:
            return torch.tensor([values], dtype=self._dtype, device=self._device)

        _expect(self.silu_mul(row(0, 1, -1), row(5, 2, 2)), [[0, 1.4621172, -0.5378828]])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _expect(actual: torch.Tensor, expected: object) -> None:
    """Raises AssertionError unless the tile holds the numbers, to a few units of bfloat16."""
    wide = actual.to("cpu", torch.float32)
    torch.testing.assert_close(wide, torch.tensor(expected, dtype=wide.dtype), atol=0, rtol=0.02)


_KERNELS: dict[str, Callable[[KernelContext], Kernel]] = {
    "linear": TorchLinear,
    "rms_norm": TorchRMSNorm,
    "rotary": TorchRotary,
    "silu_mul": TorchSiluMul,
    "sample": TorchSample,
}
