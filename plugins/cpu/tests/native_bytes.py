"""Calls linear layers on int8 weights with int8 inputs, and on float8 weights, of a built library, in
the manner of native_calls.py.

python -m tests.native_bytes libpegboard_cpu.so
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tests.native_calls import RANDOM, Floats, Library, PackedWeight, pools, spread

LINE = 64
SHAPES = ((1, 1), (35, 70), (16, 128), (53, 203))


def lined_up(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that begins at a cache line, as vectors of the library do."""
    whole = np.full(num_bytes + LINE, 0x55, dtype=np.uint8)
    return whole[-whole.ctypes.data % LINE :][:num_bytes]


def group_ends(inputs: int, size: int) -> NDArray[np.int32]:
    return np.minimum(np.arange(size, inputs + size, size), inputs).astype(np.int32)


def whole_weights(library: Library, pool: int) -> Iterator[tuple[PackedWeight, Floats]]:
    """Packed, and dequantized."""
    for shape, size, sharing, scale, offsets in product(
        SHAPES, (24, 10**6), (0, 20), (0.0, 0.02), ("none", "zeros", "minima")
    ):
        memory = RANDOM.integers(-128, 128, shape[0] * (shape[1] + 3) - 3).astype(np.int8)
        codes = np.lib.stride_tricks.as_strided(memory, shape, (shape[1] + 3, 1))
        ends = group_ends(shape[1], size)
        order = RANDOM.permutation(shape[1]).astype(np.int32) if sharing else None
        scales, extra = ((0.5 + RANDOM.random((shape[0], len(ends)))).astype(np.float32),) * 2
        zeros = np.round(extra * 9) if offsets == "zeros" else None
        minima = extra if offsets == "minima" else None
        zero = -7 if scale and offsets != "none" else 0
        handle = library.number(
            "pb_w8a8_create",
            *(*shape, sharing, scale > 0, scale, zero, len(ends), ends, order),
            *(zeros is not None, minima is not None),
        )
        packed = PackedWeight(handle, shape[0], lined_up(library.number("pb_w8a8_size", handle)))
        stride = codes.strides[0]
        library.call(
            "pb_w8a8_pack", handle, pool, packed.memory, codes, stride, scales, zeros, minima
        )
        groups = np.empty(shape[1], dtype=np.int64)
        places = np.arange(shape[1]) if order is None else order
        groups[places] = np.searchsorted(ends, np.arange(shape[1]), side="right")
        centred = codes.astype(np.float32) - (0 if zeros is None else zeros[:, groups])
        values = centred * scales[:, groups]
        yield packed, values if minima is None else values + minima[:, groups]


def float8_weights(library: Library, pool: int) -> Iterator[tuple[PackedWeight, Floats]]:
    """The same of float8; codes of whole numbers from -15 to 15."""
    numbers = np.array([0, *(2**e * (1 + m / 8) for e in range(4) for m in range(8))], np.float32)
    bytes_of = np.array([0, *range(7 << 3, 11 << 3)], dtype=np.uint8)
    for shape, size, inputs in product(SHAPES, (24, 10**6), (0, 1, 2)):
        pick = RANDOM.integers(0, len(numbers), shape)
        sign = RANDOM.integers(0, 2, shape)
        codes = (bytes_of[pick] | (sign << 7)).astype(np.uint8)
        ends = group_ends(shape[1], size)
        groups = np.searchsorted(ends, np.arange(shape[1]), side="right").astype(np.int32)
        scales = (0.5 + RANDOM.random((shape[0], len(ends)))).astype(np.float32)
        handle = library.number(
            "pb_float8_create", *shape, inputs, 50, 0.01, scales.shape[1], groups
        )
        packed = PackedWeight(handle, shape[0], lined_up(library.number("pb_float8_size", handle)))
        library.call("pb_float8_pack", handle, pool, packed.memory, codes, shape[1], scales)
        values = numbers[pick] * np.where(sign, -1, 1).astype(np.float32) * scales[:, groups]
        yield packed, values.astype(np.float32)


def check(library: Library, pool: int, packed: PackedWeight, values: Floats) -> None:
    x = spread((100, values.shape[1]), 3).clip(-2, 2)
    whole = packed.product(library, pool, x)
    expected = x.astype(np.float64) @ values.T
    # float8 keeps four bits of a number, int8 half a scale, of amax / 127 or 0.02, of it
    bound = (np.abs(x) / 16 + 0.011) @ np.abs(values).T + 1e-3
    assert (np.abs(whole - expected) <= bound).all()
    for num_rows in (1, 2, 5, 13, 29, 40):
        rows = packed.product(library, pool, x[-num_rows:])
        np.testing.assert_array_equal(rows, whole[-num_rows:])
    packed.check_rows(library, pool, values)
    library.call("pb_weight_destroy", packed.handle)


def main(path: str) -> None:
    library = Library(path)
    for pool in pools(library):
        for weights in (whole_weights, float8_weights):
            for packed, values in weights(library, pool):
                check(library, pool, packed, values)


if __name__ == "__main__":
    main(sys.argv[1])
