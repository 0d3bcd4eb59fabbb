"""Linear layers on weights in codes, in plain torch: the reference of every format.

Codes are kept and dequantized on each call. Where inputs are quantized to int8, a row's bits depend
on nothing else: sums are exact, and what is rounded is rounded number by number.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.nn import functional as F

from pegboard.builtin.torch_codes import (
    FLOAT8_MAX,
    INT8_MAX,
    Codes,
    Piece,
    codes_of,
    dequantize,
    fused,
    input_scales,
    rows_of,
    to_float8,
    to_int8,
)
from pegboard.interfaces.kernel import KernelContext, LinearKernel, PackedWeight
from pegboard.interfaces.quantizer import LinearWeight


def torch_quantized_linear(context: KernelContext) -> LinearKernel:
    """The kernel of a format other than `float`."""
    kind, _, activations = context.format.partition(":")
    if not activations:
        return TorchCodesLinear(context)
    return TorchFloat8Linear(context) if kind == "float8" else TorchIntegerLinear(context)


class TorchCodesLinear(LinearKernel):
    """y = x·Wᵀ with the dequantized W; products in float32, or float64 where x is."""

    gathers = True

    def __init__(self, context: KernelContext) -> None:
        self._format = context.format
        self._dtype: torch.dtype = getattr(torch, context.activation_dtype)
        self._device = torch.device(context.device)

    def prepare(self, weight: LinearWeight) -> PackedWeight:
        assert weight.format == self._format, f"{weight.format} is not {self._format}"
        return PackedWeight(codes_of(weight, self._device))

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        codes = cast(Codes, weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        values = dequantize(codes.weight, codes.groups).to(wide)
        return F.linear(x.to(wide), values).to(x.dtype)

    def gather_rows(self, weight: PackedWeight, row_ids: torch.Tensor) -> torch.Tensor:
        codes = cast(Codes, weight)
        return dequantize(rows_of(codes.weight, row_ids), codes.groups).to(self._dtype)

    def self_test(self) -> None:
        """Numbers that are exact in every dtype; the largest input makes its scale 1."""
        kind, _, activations = self._format.partition(":")
        code_dtype = {"uint4": torch.uint8, "float8": torch.float8_e4m3fn}.get(kind, torch.int8)
        weight = LinearWeight(
            self._format,
            (2, 3),
            codes=torch.tensor([[1, 2, 3], [4, 5, 6]]).to(code_dtype),
            scales=torch.tensor([[2.0], [0.5]]),
            zeros=torch.tensor([[1.0], [2.0]]),
            activations=activations or "float",  # type: ignore[arg-type]  # one of those in a format
            input_scale=torch.ones(1) if activations == "static" else None,
        )
        packed = self.prepare(weight)
        largest = FLOAT8_MAX if kind == "float8" else INT8_MAX
        x = torch.tensor([[largest, 3, -largest]], dtype=self._dtype, device=self._device)
        self._expect(self.linear(x, packed), [[6 - 4.0 * largest, 4.5 - largest]])
        row_ids = torch.tensor([1, 0], device=self._device)
        self._expect(self.gather_rows(packed, row_ids), [[1, 1.5, 2], [0, 2, 4]])

    def _expect(self, actual: torch.Tensor, expected: list[list[float]]) -> None:
        wanted = torch.tensor(expected, dtype=self._dtype)
        assert torch.equal(actual.cpu(), wanted), f"computed {actual.tolist()} for {expected}"


class TorchFloat8Linear(TorchCodesLinear):
    """y = x·Wᵀ with inputs rounded to float8 after scaling."""

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        codes = cast(Codes, weight)
        inputs = x.float()[:, codes.order]
        scales = input_scales(inputs, codes, FLOAT8_MAX)
        rounded = torch.empty_like(inputs)
        for piece in codes.pieces:
            some, scale = slice(piece.start, piece.stop), scales[:, piece.block, None]
            rounded[:, codes.order[some]] = to_float8(inputs[:, some], scale)
        return super().linear(rounded, weight).to(x.dtype)


class TorchIntegerLinear(TorchCodesLinear):
    """y = x·Wᵀ with inputs quantized to int8: whole numbers within a piece, then float32."""

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        codes = cast(Codes, weight)
        inputs = x.float()[:, codes.order]
        scales = input_scales(inputs, codes, INT8_MAX)
        y = x.new_zeros((len(x), codes.weight.shape[0]), dtype=torch.float32)
        for piece in codes.pieces:
            scale = scales[:, piece.block, None]
            q = to_int8(inputs[:, piece.start : piece.stop], scale, codes.weight)
            y = _add_piece(y, q.double(), scale, codes, piece)
        return y.to(x.dtype)


def _add_piece(
    y: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, codes: Codes, piece: Piece
) -> torch.Tensor:
    """y plus a piece's part of the product.

    Args:
        y: float32 [num_rows, out_features].
        q: the piece's inputs, whole numbers in float64 [num_rows, n], in which all sums are exact.
        scale: of those, float32 [num_rows, 1].
    """
    weight, group = codes.weight, piece.group
    assert weight.codes is not None and weight.scales is not None
    total = q.sum(1, keepdim=True)
    products = q @ weight.codes[:, codes.order[piece.start : piece.stop]].double().T
    if weight.zeros is not None:
        products -= total * weight.zeros[:, group]
    y = fused(products.float(), scale * weight.scales[:, group], y)
    if weight.minima is not None:
        y = fused(total.float(), scale * weight.minima[:, group], y)
    return y
