"""y = x·Wᵀ in float32 with weights packed for streaming."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import cast

import torch

from pegboard.interfaces.kernel import KernelContext, LinearKernel, PackedWeight
from pegboard.interfaces.quantizer import LinearWeight
from pegboard_cpu.library import INT, POINTER, SIZE, function, pool_of

_REGION_BYTES = 64 << 20
_LINE_BYTES = 64


class _HugePages:
    """Memory for weights on huge pages where the system has them: looking up the addresses of
    small ones takes a third of the time of a product of few rows.

    A weight may be smaller than a page, so they share regions. What is not used yet of a region
    takes addresses and no memory; a region lives as long as a tensor in it.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0)

    def take(self, num_floats: int) -> torch.Tensor:
        """float32 [num_floats], at the start of a cache line."""
        line = _LINE_BYTES // 4
        taken = (num_floats + line - 1) // line * line
        if taken > self._free.shape[0]:
            self._free = self._region(max(_REGION_BYTES, 4 * taken))
        tensor, self._free = self._free[:num_floats], self._free[taken:]
        return tensor

    def _region(self, num_bytes: int) -> torch.Tensor:
        # shared memory, which is mmap's default, gets no huge pages
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Panels:
    """A packed weight, in the instruction set's layout.

    Attributes:
        values: float32, one-dimensional.
        address: of `values`.
        out_features, in_features: as before packing.
    """

    values: torch.Tensor
    address: int
    out_features: int
    in_features: int


class CPULinear(LinearKernel):
    """Each output is one chain of multiply-adds over the inputs in ascending order, so that a row's
    bits do not depend on the rows beside it nor on the number of threads."""

    gathers = True

    def __init__(self, context: KernelContext) -> None:
        self._pool = pool_of(context.num_threads)
        self._memory = _HugePages()
        self._packed_size = function("pb_linear_packed_size", SIZE, SIZE, SIZE)
        self._pack = function("pb_linear_pack", None, POINTER, SIZE, SIZE, POINTER, SIZE, POINTER)
        self._linear = function(
            "pb_linear", None, POINTER, SIZE, SIZE, SIZE, POINTER, SIZE, POINTER, POINTER
        )
        self._gather = function(
            "pb_linear_gather", INT, POINTER, SIZE, SIZE, SIZE, POINTER, POINTER, POINTER
        )

    def prepare(self, weight: LinearWeight) -> PackedWeight:
        """Copies a float weight into panels; keeps nothing of it."""
        assert weight.values is not None, f"a weight of format {weight.format} has no values"
        assert min(weight.shape) > 0, f"a weight of shape {weight.shape} is empty"
        values = _dense_rows(weight.values.to("cpu", torch.float32))
        out_features, in_features = values.shape
        packed = self._memory.take(self._packed_size(out_features, in_features))
        self._pack(
            self._pool.handle,
            out_features,
            in_features,
            values.data_ptr(),
            values.stride(0),
            packed.data_ptr(),
        )
        return PackedWeight(Panels(packed, packed.data_ptr(), out_features, in_features))

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        panels = cast(Panels, weight)
        num_rows, in_features = x.shape
        assert x.dtype == torch.float32 and in_features == panels.in_features, (
            f"inputs are {x.dtype} {list(x.shape)}; allowed: float32 [rows, {panels.in_features}]"
        )
        x = _dense_rows(x)
        y = torch.empty((num_rows, panels.out_features), dtype=torch.float32)
        self._linear(
            self._pool.handle,
            num_rows,
            panels.out_features,
            in_features,
            x.data_ptr(),
            x.stride(0),
            panels.address,
            y.data_ptr(),
        )
        return y

    def gather_rows(self, weight: PackedWeight, row_ids: torch.Tensor) -> torch.Tensor:
        """Raises IndexError where an id is not a row of the weight."""
        panels = cast(Panels, weight)
        assert row_ids.dtype == torch.int64, f"row ids are {row_ids.dtype}; allowed: int64"
        row_ids = row_ids.contiguous()
        rows = torch.empty((row_ids.shape[0], panels.in_features), dtype=torch.float32)
        found = self._gather(
            self._pool.handle,
            row_ids.shape[0],
            panels.out_features,
            panels.in_features,
            panels.address,
            row_ids.data_ptr(),
            rows.data_ptr(),
        )
        if not found:
            raise IndexError(f"row ids {row_ids.tolist()}; allowed: 0 to {panels.out_features - 1}")
        return rows

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


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
