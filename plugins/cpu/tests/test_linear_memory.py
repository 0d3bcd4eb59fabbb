"""Linear layers touch their own memory alone. Numpy and no torch, so that a sanitizer can watch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pegboard_cpu.library import INT, POINTER, SIZE, function, pool_of

GUARD = 64
"""NaNs before and after what may be written."""

SHAPES = ((517, 40), (70, 577), (3, 200), (33, 1000), (1, 1))


class Guarded:
    """An array of NaNs amid others: none may stay inside, and all outside."""

    def __init__(self, *shape: int) -> None:
        size = int(np.prod(shape))
        self._memory = np.full(size + 2 * GUARD, np.nan, np.float32)
        self.values = self._memory[GUARD : GUARD + size].reshape(shape)

    def check(self) -> npt.NDArray[np.float32]:
        assert np.isnan(self._memory[:GUARD]).all() and np.isnan(self._memory[-GUARD:]).all()
        assert np.isfinite(self.values).all()
        return self.values


def address(array: npt.NDArray[Any]) -> int:
    pointer: int = array.ctypes.data
    return pointer


class Weight:
    """A packed weight of the library, in guarded memory."""

    def __init__(self, weight: npt.NDArray[np.float32], num_threads: int) -> None:
        self._destroy = function("pb_weight_destroy", None, POINTER)
        self.packed = Guarded(function("pb_linear_packed_size", SIZE, SIZE, SIZE)(*weight.shape))
        pack = function("pb_linear_pack", POINTER, POINTER, SIZE, SIZE, POINTER, SIZE, POINTER)
        self.handle: int = pack(
            *(pool_of(num_threads).handle, *weight.shape, address(weight), weight.shape[1]),
            address(self.packed.values),
        )
        self.packed.check()

    def __del__(self) -> None:
        self._destroy(self.handle)


def product(
    x: npt.NDArray[np.float32], weight: Weight, out_features: int, num_threads: int
) -> npt.NDArray[np.float32]:
    y = Guarded(len(x), out_features)
    multiply = function("pb_weight_multiply", None, POINTER, POINTER, SIZE, POINTER, SIZE, POINTER)
    pool, row_stride = pool_of(num_threads), x.strides[0] // x.itemsize
    multiply(weight.handle, pool.handle, len(x), address(x), row_stride, address(y.values))
    return y.check()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_a_product_writes_all_of_its_output_and_no_more(
    shape: tuple[int, int], num_threads: int
) -> None:
    random = np.random.default_rng(4)
    weight = random.standard_normal(shape, np.float32)
    packed = Weight(weight, num_threads)
    # what lies between the rows of x must not reach the sums
    x = Guarded(100, shape[1] + 5).values[:, : shape[1]]
    x[:] = random.standard_normal(x.shape, np.float32)
    whole = product(x, packed, shape[0], num_threads)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-6 * shape[1])
    for num_rows in range(1, 41):
        rows = product(x[-num_rows:], packed, shape[0], num_threads)
        assert np.array_equal(rows, whole[-num_rows:])


def test_gathered_rows_fill_their_output_and_no_more() -> None:
    weight = np.random.default_rng(4).standard_normal((517, 41), np.float32)
    packed, out = Weight(weight, 2), Guarded(3, 41)
    row_ids = np.array([516, 0, 33])
    gather = function("pb_weight_gather", INT, POINTER, POINTER, SIZE, POINTER, POINTER)
    found = gather(packed.handle, pool_of(2).handle, 3, address(row_ids), address(out.values))
    assert found and np.array_equal(out.check(), weight[row_ids])
