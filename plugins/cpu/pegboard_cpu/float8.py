"""y = x·Wᵀ with weights in float8, and inputs as they are or rounded to float8 after scaling.

The bits are those of the float kernel on the dequantized weight; see `native/float8.h`.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from pegboard.interfaces.kernel import KernelContext, PackedWeight
from pegboard.interfaces.quantizer import LinearWeight
from pegboard_cpu.groups import group_of_inputs
from pegboard_cpu.library import FLOAT, INT, POINTER, SIZE, function
from pegboard_cpu.weight import NativeLinear, NativeWeight, dense_rows


class _Inputs(IntEnum):
    """`Float8Inputs` of native/float8.h."""

    FLOAT = 0
    STATIC = 1
    DYNAMIC = 2


class CPUFloat8(NativeLinear):
    """Formats `float8`, `float8:dynamic` and `float8:static`."""

    def __init__(self, context: KernelContext) -> None:
        super().__init__(context)
        _, _, activations = context.format.partition(":")
        self._inputs = _Inputs[(activations or "float").upper()]
        self._create = function(
            "pb_float8_create", POINTER, SIZE, SIZE, INT, SIZE, FLOAT, SIZE, POINTER
        )
        self._size = function("pb_float8_size", SIZE, POINTER)
        self._pack = function(
            "pb_float8_pack", None, POINTER, POINTER, POINTER, POINTER, SIZE, POINTER
        )

    def prepare(self, weight: LinearWeight) -> PackedWeight:
        """Copies codes and scales into panels; keeps nothing of the weight."""
        assert weight.format == self._format, f"{weight.format} is not {self._format}"
        assert weight.codes is not None and weight.codes.dtype == torch.float8_e4m3fn
        assert weight.scales is not None and weight.zeros is None and weight.minima is None
        assert min(weight.shape) > 0, f"a weight of shape {weight.shape} is empty"
        assert not bool(weight.codes.isnan().any()), "codes hold NaN"
        codes = dense_rows(weight.codes.cpu())
        scales = weight.scales.cpu().float().contiguous()
        groups = group_of_inputs(weight)
        scale = 0.0 if weight.input_scale is None else weight.input_scale.item()
        handle = self._create(
            *(*weight.shape, self._inputs, weight.input_group or 0, scale),
            *(scales.shape[1], groups.data_ptr()),
        )
        packed = self._memory.take(self._size(handle))
        native = NativeWeight(handle, weight.shape, [packed])
        self._pack(
            *(handle, self._pool.handle, packed.data_ptr(), codes.data_ptr(), codes.stride(0)),
            scales.data_ptr(),
        )
        return PackedWeight(native)

    def self_test(self) -> None:
        """Small whole numbers, of which every sum is exact; the largest input makes its scale 1."""
        static = self._inputs is _Inputs.STATIC
        codes = (torch.arange(37 * 205).view(37, 205) % 17 - 8).float()
        x = (torch.arange(19 * 205).view(19, 205) % 13 - 6).float()
        x[:, 7] = 448
        weight = LinearWeight(
            self._format,
            (37, 205),
            codes=codes.to(torch.float8_e4m3fn),
            scales=torch.full((37, 2), 0.5),
            group_size=128,
            activations="static" if static else "dynamic" if self._inputs else "float",
            input_scale=torch.ones(1) if static else None,
        )
        packed = self.prepare(weight)
        expected = (x.double() @ codes.double().T / 2).float()
        for num_rows in (1, 19):
            y = self.linear(x[:num_rows], packed)
            assert torch.equal(y, expected[:num_rows]), f"a product of {num_rows} rows is wrong"
        row_ids = torch.tensor([36, 0])
        assert torch.equal(self.gather_rows(packed, row_ids), codes[row_ids] / 2), "wrong rows"
