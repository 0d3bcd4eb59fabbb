"""y = x·Wᵀ with int8 weights and inputs quantized to int8: by a scale of each token, or by one for all.

What is computed and in which order is at the top of `native/w8a8.inl`, the layout in
`native/w8a8.h`.
"""

from __future__ import annotations

import torch

from pegboard.interfaces.kernel import KernelContext, PackedWeight
from pegboard.interfaces.quantizer import LinearWeight
from pegboard_cpu.groups import groups_in_order
from pegboard_cpu.library import FLOAT, INT, POINTER, SIZE, function
from pegboard_cpu.weight import NativeLinear, NativeWeight, dense_rows

_MOST_INPUTS = 65536
"""So many products of a code and an input, less their zeros, fit 32 bits."""


class CPUW8A8(NativeLinear):
    """Formats `int8:dynamic` and `int8:static`: exact sums of whole numbers, then float32."""

    def __init__(self, context: KernelContext) -> None:
        super().__init__(context)
        self._create = function(
            "pb_w8a8_create",
            POINTER,
            *(SIZE, SIZE, SIZE, INT, FLOAT, INT, SIZE),
            *(POINTER, POINTER, INT, INT),
        )
        self._size = function("pb_w8a8_size", SIZE, POINTER)
        self._pack = function(
            "pb_w8a8_pack",
            None,
            *(POINTER, POINTER, POINTER, POINTER, SIZE),
            *(POINTER, POINTER, POINTER),
        )

    def prepare(self, weight: LinearWeight) -> PackedWeight:
        """Copies codes, scales and offsets into panels; keeps nothing of the weight."""
        assert weight.format == self._format, f"{weight.format} is not {self._format}"
        assert weight.codes is not None and weight.codes.dtype == torch.int8
        assert weight.scales is not None
        assert 0 < weight.shape[1] <= _MOST_INPUTS and weight.shape[0] > 0, f"{weight.shape}"
        codes = dense_rows(weight.codes.cpu())
        ends, order = groups_in_order(weight)
        scales, zeros, minima = (
            None if numbers is None else numbers.cpu().float().contiguous()
            for numbers in (weight.scales, weight.zeros, weight.minima)
        )
        scale, zero = _static_scale(weight)
        handle = self._create(
            *(*weight.shape, weight.input_group or 0, weight.activations == "static"),
            *(scale, zero, len(ends), ends.data_ptr(), _address(order)),
            *(zeros is not None, minima is not None),
        )
        packed = self._memory.take(self._size(handle))
        native = NativeWeight(handle, weight.shape, [packed])
        self._pack(
            *(handle, self._pool.handle, packed.data_ptr(), codes.data_ptr(), codes.stride(0)),
            *(_address(scales), _address(zeros), _address(minima)),
        )
        return PackedWeight(native)

    def self_test(self) -> None:
        """Whole numbers at the ends of their range, of which every sum is exact."""
        static = self._format.endswith("static")
        codes = torch.arange(37 * 205).view(37, 205) % 256 - 128
        codes[0], codes[1] = -128, 127
        x = torch.arange(19 * 205).view(19, 205) % 255 - 127
        x[:, 0], x[1], x[2] = 127, 127, -127
        weight = LinearWeight(
            self._format,
            (37, 205),
            codes=codes.to(torch.int8),
            scales=torch.full((37, 1), 0.5),
            zeros=torch.arange(37.0).view(37, 1) % 3,
            activations="static" if static else "dynamic",
            input_scale=torch.ones(1) if static else None,
        )
        values = (codes - torch.arange(37).view(37, 1) % 3).double() / 2
        packed = self.prepare(weight)
        for num_rows in (1, 19):
            y = self.linear(x[:num_rows].float(), packed)
            expected = (x[:num_rows].double() @ values.T).float()
            assert torch.equal(y, expected), f"a product of {num_rows} rows is wrong"
        row_ids = torch.tensor([36, 0])
        rows = self.gather_rows(packed, row_ids)
        assert torch.equal(rows, values[row_ids].float()), "wrong rows"


def _static_scale(weight: LinearWeight) -> tuple[float, int]:
    """Scale and zero of all inputs, where they are static."""
    if weight.activations != "static":
        return 0.0, 0
    assert weight.input_scale is not None, "static activations without an input scale"
    zero = 0.0 if weight.input_zero is None else weight.input_zero.item()
    assert zero == int(zero) and -128 <= zero <= 127, f"the inputs' zero is {zero}"
    return weight.input_scale.item(), int(zero)


def _address(numbers: torch.Tensor | None) -> int:
    return 0 if numbers is None else numbers.data_ptr()
