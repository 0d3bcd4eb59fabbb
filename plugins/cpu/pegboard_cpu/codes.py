"""y = x·Wᵀ with weights in 4- or 8-bit codes, which stay codes in memory.

What is computed and in which order is at the top of `native/codes.inl`, the layout in
`native/codes.h`. A weight takes its codes, and a group's scale and zero or minimum: scales and minima
in float16 where that is exact, else in float32; zeros in int16, and nothing where all are the same.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from pegboard.interfaces.kernel import KernelContext, PackedWeight
from pegboard.interfaces.quantizer import LinearWeight
from pegboard_cpu.groups import groups_in_order
from pegboard_cpu.library import INT, POINTER, SIZE, function
from pegboard_cpu.weight import NativeLinear, NativeWeight, dense_rows

_MOST_WHOLE = 16000
"""Zeros up to here leave room in int16 for what is added to a code."""


class _Offsets(IntEnum):
    """`Offsets` of native/codes.h."""

    CONSTANT = 0
    WHOLE = 1
    FRACTION = 2
    MINIMA = 3
    MINIMA_HALF = 4


class CPUCodes(NativeLinear):
    """Formats `uint4` and `int8` with float inputs, and the same with inputs quantized to int8 in
    groups of 32 (`:grouped`): exact sums within a group, then float32."""

    def __init__(self, context: KernelContext) -> None:
        super().__init__(context)
        kind, _, activations = context.format.partition(":")
        self._bits = {"uint4": 4, "int8": 8}[kind]
        self._code_dtype = {"uint4": torch.uint8, "int8": torch.int8}[kind]
        self._activations = activations or "float"
        self._create = function(
            "pb_codes_create",
            POINTER,
            *(SIZE, SIZE, SIZE, INT, SIZE),
            *(POINTER, POINTER, INT, SIZE, SIZE),
        )
        self._size = function("pb_codes_size", SIZE, POINTER)
        self._pack = function(
            "pb_codes_pack", None, POINTER, POINTER, POINTER, POINTER, SIZE, POINTER, POINTER
        )

    def prepare(self, weight: LinearWeight) -> PackedWeight:
        """Copies codes, scales and offsets into panels; keeps nothing of the weight."""
        assert weight.format == self._format, f"{weight.format} is not {self._format}"
        assert weight.codes is not None and weight.scales is not None
        assert min(weight.shape) > 0, f"a weight of shape {weight.shape} is empty"
        codes = dense_rows(weight.codes.cpu())
        assert codes.dtype == self._code_dtype, f"codes are {codes.dtype}"
        ends, order = groups_in_order(weight)
        scales = _narrowed(weight.scales.cpu().float().contiguous())
        kind, offsets, zero = _offsets(weight)
        handle = self._create(
            *(*weight.shape, self._bits, self._activations == "grouped", len(ends)),
            *(ends.data_ptr(), 0 if order is None else order.data_ptr()),
            *(scales.dtype == torch.float16, kind, zero),
        )
        packed = self._memory.take(self._size(handle))
        native = NativeWeight(handle, weight.shape, [packed])
        self._pack(
            *(handle, self._pool.handle, packed.data_ptr(), codes.data_ptr(), codes.stride(0)),
            *(scales.data_ptr(), 0 if offsets is None else offsets.data_ptr()),
        )
        return PackedWeight(native)

    def self_test(self) -> None:
        """Whole numbers, of which every sum is exact; the largest input makes its scale 1."""
        low, high = (0, 15) if self._bits == 4 else (-128, 127)
        codes = torch.arange(37 * 205).view(37, 205) % (high - low + 1) + low
        zeros = torch.arange(37.0 * 7).view(37, 7) % 3
        x = torch.arange(19 * 205, dtype=torch.float32).view(19, 205) % 13 - 6
        x[:, ::16] = 127.0
        weight = LinearWeight(
            self._format,
            (37, 205),
            codes=codes.to(self._code_dtype),
            scales=torch.full((37, 7), 0.5),
            zeros=zeros,
            group_size=32,
            activations="grouped" if self._activations == "grouped" else "float",
        )
        values = (codes - zeros.repeat_interleave(32, dim=1)[:, :205].long()).double() / 2
        expected = (x[:, None].double() * values).sum(-1).float()
        packed = self.prepare(weight)
        for num_rows in (1, 19):
            y = self.linear(x[:num_rows], packed)
            assert torch.equal(y, expected[:num_rows]), f"a product of {num_rows} rows is wrong"
        row_ids = torch.tensor([36, 0])
        rows = self.gather_rows(packed, row_ids)
        assert torch.equal(rows, values[row_ids].float()), "wrong rows"


def _offsets(weight: LinearWeight) -> tuple[_Offsets, torch.Tensor | None, int]:
    """The form of zeros or minima, their tensor, and the zero if it is one for all."""
    if weight.minima is not None:
        assert weight.zeros is None, "a weight has zeros or minima, not both"
        minima = _narrowed(weight.minima.cpu().float().contiguous())
        half = minima.dtype == torch.float16
        return _Offsets.MINIMA_HALF if half else _Offsets.MINIMA, minima, 0
    if weight.zeros is None:
        return _Offsets.CONSTANT, None, 0
    zeros = weight.zeros.cpu().float().contiguous()
    if not bool((zeros.round() == zeros).all() and (zeros.abs() <= _MOST_WHOLE).all()):
        return _Offsets.FRACTION, zeros, 0
    if bool((zeros == zeros[0, 0]).all()):
        return _Offsets.CONSTANT, None, int(zeros[0, 0])
    return _Offsets.WHOLE, zeros.to(torch.int16), 0


def _narrowed(numbers: torch.Tensor) -> torch.Tensor:
    """In float16 where that keeps every number."""
    half = numbers.half()
    return half if torch.equal(half.float(), numbers) else numbers
