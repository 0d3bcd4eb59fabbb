"""Packed weights of any format, and linear layers on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from pegboard.interfaces.kernel import KernelContext, LinearKernel, PackedWeight
from pegboard_cpu.library import INT, POINTER, SIZE, function, pool_of
from pegboard_cpu.memory import HugePages


class NativeWeight:
    """A weight of the library, in any format.

    Args:
        handle: a `Weight` of the library, destroyed with this.
        shape: [out_features, in_features].
        kept: memory that the weight points to.

    Attributes:
        handle, out_features, in_features: as above.
        num_bytes: of that memory.
    """

    def __init__(self, handle: int, shape: tuple[int, int], kept: Sequence[torch.Tensor]) -> None:
        self.handle = handle
        self.out_features, self.in_features = shape
        self.num_bytes = sum(tensor.nbytes for tensor in kept)
        self._kept = kept
        self._destroy = function("pb_weight_destroy", None, POINTER)

    def __del__(self) -> None:
        if hasattr(self, "_destroy"):
            self._destroy(self.handle)


class NativeLinear(LinearKernel):
    """Products with native weights; a format says how one is made.

    A row's bits depend neither on the rows beside it nor on the number of threads.
    """

    gathers = True

    def __init__(self, context: KernelContext) -> None:
        self._format = context.format
        self._pool = pool_of(context.num_threads)
        self._memory = HugePages()
        self._multiply = function(
            "pb_weight_multiply", None, POINTER, POINTER, SIZE, POINTER, SIZE, POINTER
        )
        self._gather = function("pb_weight_gather", INT, POINTER, POINTER, SIZE, POINTER, POINTER)

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        native = cast(NativeWeight, weight)
        num_rows, in_features = x.shape
        assert x.dtype == torch.float32 and in_features == native.in_features, (
            f"inputs are {x.dtype} {list(x.shape)}; allowed: float32 [rows, {native.in_features}]"
        )
        x = dense_rows(x)
        y = torch.empty((num_rows, native.out_features), dtype=torch.float32)
        self._multiply(
            native.handle, self._pool.handle, num_rows, x.data_ptr(), x.stride(0), y.data_ptr()
        )
        return y

    def gather_rows(self, weight: PackedWeight, row_ids: torch.Tensor) -> torch.Tensor:
        """Raises IndexError where an id is not a row of the weight."""
        native = cast(NativeWeight, weight)
        assert row_ids.dtype == torch.int64, f"row ids are {row_ids.dtype}; allowed: int64"
        row_ids = row_ids.contiguous()
        rows = torch.empty((row_ids.shape[0], native.in_features), dtype=torch.float32)
        found = self._gather(
            native.handle,
            self._pool.handle,
            row_ids.shape[0],
            row_ids.data_ptr(),
            rows.data_ptr(),
        )
        if not found:
            raise IndexError(f"row ids {row_ids.tolist()}; allowed: 0 to {native.out_features - 1}")
        return rows


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with those of a row side by side: mostly x itself."""
    return x if x.stride(1) == 1 else x.contiguous()
