"""y = x·Wᵀ in float32 with weights packed for streaming."""

from __future__ import annotations

import torch

from pegboard.interfaces.kernel import KernelContext, PackedWeight
from pegboard.interfaces.quantizer import LinearWeight
from pegboard_cpu.library import POINTER, SIZE, function
from pegboard_cpu.weight import NativeLinear, NativeWeight, dense_rows


class CPULinear(NativeLinear):
    """Each output is one chain of multiply-adds over the inputs in ascending order, so that a row's
    bits do not depend on the rows beside it nor on the number of threads."""

    def __init__(self, context: KernelContext) -> None:
        super().__init__(context)
        self._packed_size = function("pb_linear_packed_size", SIZE, SIZE, SIZE)
        self._pack = function(
            "pb_linear_pack", POINTER, POINTER, SIZE, SIZE, POINTER, SIZE, POINTER
        )

    def prepare(self, weight: LinearWeight) -> PackedWeight:
        """Copies a float weight into panels; keeps nothing of it."""
        assert weight.values is not None, f"a weight of format {weight.format} has no values"
        assert min(weight.shape) > 0, f"a weight of shape {weight.shape} is empty"
        values = dense_rows(weight.values.to("cpu", torch.float32))
        packed = self._memory.take(4 * self._packed_size(*weight.shape))
        handle = self._pack(
            self._pool.handle,
            *weight.shape,
            values.data_ptr(),
            values.stride(0),
            packed.data_ptr(),
        )
        return PackedWeight(NativeWeight(handle, weight.shape, [packed]))

    def self_test(self) -> None:
        # small integers: every order of summation gives the same, exact numbers
        weight = torch.arange(37 * 205, dtype=torch.float32).view(37, 205) % 11 - 5
        x = torch.arange(19 * 205, dtype=torch.float32).view(19, 205) % 7 - 3
        packed = self.prepare(LinearWeight("float", (37, 205), values=weight))
        expected = (x[:, None].double() * weight.double()).sum(-1).float()
        for num_rows in (1, 19):
            y = self.linear(x[:num_rows], packed)
            assert torch.equal(y, expected[:num_rows]), f"a product of {num_rows} rows is wrong"
        row_ids = torch.tensor([36, 0])
        assert torch.equal(self.gather_rows(packed, row_ids), weight[row_ids]), "wrong rows"
