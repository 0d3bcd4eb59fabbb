"""RMSNorm, rotary embedding and SiLU-mul in float32, each row by itself."""

from __future__ import annotations

import torch

from pegboard.interfaces.kernel import KernelContext, RMSNormKernel, RotaryKernel, SiluMulKernel
from pegboard_cpu.library import FLOAT, POINTER, SIZE, function, pool_of

_HEADS = (SIZE, SIZE, SIZE, POINTER, SIZE, SIZE)


class CPURMSNorm(RMSNormKernel):
    """x / sqrt(mean(x²) + eps) * weight, the squares summed in one order for every batch."""

    def __init__(self, context: KernelContext) -> None:
        self._pool = pool_of(context.num_threads)
        self._norm = function("pb_rms_norm", None, POINTER, *_HEADS, POINTER, FLOAT, POINTER)
        self._add_norm = function(
            "pb_add_rms_norm", None, POINTER, *(SIZE, SIZE), *(POINTER, SIZE) * 2, POINTER, FLOAT
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed = torch.empty(x.shape)
        heads = _heads(x)
        self._norm(
            self._pool.handle,
            *heads.shape,
            heads.data_ptr(),
            *heads.stride()[:2],
            weight.data_ptr(),
            eps,
            normed.data_ptr(),
        )
        return normed

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = _rows(x), _rows(residual)
        self._add_norm(
            self._pool.handle,
            *normed.shape,
            normed.data_ptr(),
            normed.stride(0),
            total.data_ptr(),
            total.stride(0),
            weight.data_ptr(),
            eps,
        )
        return normed.view(x.shape), total.view(x.shape)

    def self_test(self) -> None:
        # the root of the mean of 1, 1, 49, 49 is 5
        x, residual = torch.tensor([[1.0, 0, 3, 7]]), torch.tensor([[0.0, 1, 4, 0]])
        normed, total = self.add_rms_norm(x, residual, torch.tensor([5.0, 10, 5, 5]), 0.0)
        expect(normed, [[1, 2, 7, 7]])
        expect(total, [[1, 1, 7, 7]])


class CPURotary(RotaryKernel):
    """(a, b) -> (a·cos - b·sin, b·cos + a·sin) for the pairs of a head's two halves."""

    def __init__(self, context: KernelContext) -> None:
        self._pool = pool_of(context.num_threads)
        self._rotate = function(
            "pb_rotate", None, POINTER, *_HEADS, POINTER, SIZE, POINTER, POINTER, POINTER
        )

    def rotate(
        self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        cos, sin = cos.float(), sin.float()
        heads, rotated = _heads(x), torch.empty(x.shape)
        self._rotate(
            self._pool.handle,
            *heads.shape,
            heads.data_ptr(),
            *heads.stride()[:2],
            positions.data_ptr(),
            cos.shape[1],
            cos.data_ptr(),
            sin.data_ptr(),
            rotated.data_ptr(),
        )
        return rotated

    def self_test(self) -> None:
        x = torch.tensor([[[1.0, 2, 3, 4, 9]]])
        # at position 1 the first pair turns by a quarter, the second not at all
        cos, sin = torch.tensor([[1.0, 1], [0, 1]]), torch.tensor([[0.0, 0], [1, 0]])
        expect(self.rotate(x, torch.tensor([1]), cos, sin), [[[-3, 2, 1, 4, 9]]])


class CPUSiluMul(SiluMulKernel):
    """gate / (1 + exp(-gate)) * up; rows may lie apart, as halves of one product's output do."""

    def __init__(self, context: KernelContext) -> None:
        self._pool = pool_of(context.num_threads)
        self._silu_mul = function(
            "pb_silu_mul", None, POINTER, *(SIZE, SIZE), *(POINTER, SIZE) * 2, POINTER
        )

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = _rows(gate), _rows(up)
        product = torch.empty(gate.shape)
        self._silu_mul(
            self._pool.handle,
            *gate.shape,
            gate.data_ptr(),
            gate.stride(0),
            up.data_ptr(),
            up.stride(0),
            product.data_ptr(),
        )
        return product

    def self_test(self) -> None:
        gate, up = torch.tensor([[0.0, 1, -1]]), torch.tensor([[5.0, 2, 2]])
        expect(self.silu_mul(gate, up), [[0, 1.4621172, -0.5378828]])


def expect(actual: torch.Tensor, expected: object) -> None:
    """Raises AssertionError unless the tensor holds the numbers."""
    wanted = torch.tensor(expected, dtype=actual.dtype)
    close = actual.shape == wanted.shape and torch.allclose(actual, wanted, atol=0, rtol=1e-5)
    assert close, f"computed {actual.tolist()} for {expected}"


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [num_rows, n] whose rows are dense; x itself or a view of it where it can be."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _heads(x: torch.Tensor) -> torch.Tensor:
    """x as [num_tokens, num_heads, n], dense along the last axis."""
    heads = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    return heads if heads.stride(2) == 1 else heads.contiguous()
