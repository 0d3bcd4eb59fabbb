"""The reference kernels in plain torch, to be read beside the formula; any device and dtype.

None promises `row_invariant`: a float32 product on a CPU sums in an order that changes with the
number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn import functional as F

from pegboard.builtin.torch_quantized import torch_quantized_linear
from pegboard.builtin.torch_sampler import TorchProbabilities, TorchSample
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

_PANEL_WIDTHS = (96, 128, 64)
"""Output features of a panel, to choose from: enough for the product's inner loops, and few enough
that a panel of a usual model stays in the second-level cache."""


def torch_kernel(context: KernelContext) -> Kernel:
    """The kernel of an operation on weights of a format."""
    if context.format != "float":
        return torch_quantized_linear(context)
    if context.operation == "linear" and context.device == "cpu":
        return TorchPanelLinear(context)
    return _KERNELS[context.operation](context)


class _TorchKernel(Kernel):
    """The base of the kernels: their dtype and device."""

    def __init__(self, context: KernelContext) -> None:
        self._dtype: torch.dtype = getattr(torch, context.activation_dtype)
        self._device = torch.device(context.device)

    def _tensor(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=self._dtype, device=self._device)


class TorchLinear(_TorchKernel, LinearKernel):
    """y = x·Wᵀ; a packed weight is a tensor [out_features, in_features]."""

    gathers = True

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


@dataclass(frozen=True, slots=True)
class _Panels:
    """A weight cut into panels of output features.

    Attributes:
        values: [num_panels, in_features, width], the last panel filled up with zeros.
        out_features: without the filling.
    """

    values: torch.Tensor
    out_features: int


class TorchPanelLinear(TorchLinear):
    """y = x·Wᵀ on a CPU, a batch of products with panels of Wᵀ.

    In one large product of few rows, most time goes into rearranging the weight on each call;
    panels lie as the product reads them.
    """

    def prepare(self, weight: LinearWeight) -> PackedWeight:
        values = cast(torch.Tensor, super().prepare(weight))
        out_features, in_features = values.shape
        width = min(_PANEL_WIDTHS, key=lambda width: -out_features % width)
        if out_features % width:
            values = F.pad(values, (0, 0, 0, -out_features % width))
        panels = values.view(-1, width, in_features).transpose(1, 2).contiguous()
        return PackedWeight(_Panels(panels, out_features))

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        panels = cast(_Panels, weight)
        num_panels, in_features, width = panels.values.shape
        num_rows = x.shape[0]
        y = torch.bmm(x.expand(num_panels, num_rows, in_features), panels.values)
        if num_rows > 1:
            y = y.transpose(0, 1)
        y = y.reshape(num_rows, num_panels * width)
        return y if panels.out_features == y.shape[1] else y[:, : panels.out_features]

    def gather_rows(self, weight: PackedWeight, row_ids: torch.Tensor) -> torch.Tensor:
        values = cast(_Panels, weight).values
        width = values.shape[2]
        return values[row_ids // width, :, row_ids % width]


class TorchRMSNorm(_TorchKernel, RMSNormKernel):
    """x / sqrt(mean(x²) + eps) * weight; rounded to the activation dtype before the weight, as the
    models were trained."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()  # in which the sum is taken
        norm: torch.Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        mean_square = norm.square_().div_(x.shape[-1])
        normed: torch.Tensor = wide * mean_square.add_(eps).rsqrt_()
        return normed.to(x.dtype).mul_(weight)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual.add_(x)
        return self.rms_norm(total, weight, eps), total

    def self_test(self) -> None:
        # the root of the mean of 1, 1, 49, 49 is 5
        x, residual = self._tensor([[1, 0, 3, 7]]), self._tensor([[0, 1, 4, 0]])
        normed, total = self.add_rms_norm(x, residual, self._tensor([5, 10, 5, 5]), 0.0)
        _expect(normed, [[1, 2, 7, 7]])
        _expect(total, [[1, 1, 7, 7]])


class TorchRotary(_TorchKernel, RotaryKernel):
    """(a, b) -> (a·cos - b·sin, b·cos + a·sin) for the pairs of a head's two halves."""

    def __init__(self, context: KernelContext) -> None:
        super().__init__(context)
        self._key: tuple[torch.Tensor, ...] = ()
        self._gathered: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))

    def rotate(
        self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        half = cos.shape[-1]
        c, s = self._angles(positions, cos, sin)
        rotated = x.to(cos.dtype, copy=True)
        a, b = rotated[..., :half], rotated[..., half : 2 * half]
        a_sin = a * s
        a.mul_(c).addcmul_(b, s, value=-1)
        b.mul_(c).add_(a_sin)
        return rotated.to(x.dtype)

    def _angles(
        self, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the positions, [num_tokens, 1, n], kept for the step's other layers."""
        key = (positions, cos, sin)
        if len(self._key) != 3 or any(a is not b for a, b in zip(key, self._key, strict=True)):
            self._key = key
            self._gathered = (cos[positions].unsqueeze(1), sin[positions].unsqueeze(1))
        return self._gathered

    def self_test(self) -> None:
        x = self._tensor([[[1, 2, 3, 4, 9]]])
        # at position 1 the first pair turns by a quarter, the second not at all
        cos = torch.tensor([[1.0, 1.0], [0.0, 1.0]], device=self._device)
        sin = torch.tensor([[0.0, 0.0], [1.0, 0.0]], device=self._device)
        position = torch.tensor([1], device=self._device)
        _expect(self.rotate(x, position, cos, sin), [[[-3, 2, 1, 4, 9]]])


class TorchSiluMul(_TorchKernel, SiluMulKernel):
    """gate / (1 + exp(-gate)) * up."""

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate, inplace=True).mul_(up)

    def self_test(self) -> None:
        gate, up = self._tensor([[0, 1, -1]]), self._tensor([[5, 2, 2]])
        _expect(self.silu_mul(gate, up), [[0, 1.4621172, -0.5378828]])


def _expect(actual: torch.Tensor, expected: object) -> None:
    """Raises AssertionError unless the tile holds the numbers, to a few units of bfloat16."""
    wide = actual.to("cpu", torch.float32)
    # torch.testing would say it better, and imports for a second
    wanted = torch.tensor(expected, dtype=wide.dtype)
    close = wide.shape == wanted.shape and torch.allclose(wide, wanted, atol=0, rtol=0.02)
    assert close, f"computed {wide.tolist()} for {expected}"


_KERNELS: dict[str, Callable[[KernelContext], Kernel]] = {
    "linear": TorchLinear,
    "rms_norm": TorchRMSNorm,
    "rotary": TorchRotary,
    "silu_mul": TorchSiluMul,
    "sample": TorchSample,
    "probabilities": TorchProbabilities,
}
