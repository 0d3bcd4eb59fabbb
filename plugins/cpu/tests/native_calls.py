"""Calls the operations of a built library at odd shapes, with numpy alone, and checks what they wrote.

    python -m tests.native_calls libpegboard_cpu.so

Made to run under a sanitizer: arrays are exactly as large as what a function may touch, so that one
element more is an error, and nothing but this file and numpy is in the process. Attention and whole
layers are in native_layers.py, weights in codes in native_codes.py.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Argument = NDArray[np.generic] | int | float | None

RANDOM = np.random.default_rng(1)


class Library:
    """The library's functions by name: arrays cross as addresses, ints as 64 bits, floats as 32."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def call(self, name: str, *arguments: Argument) -> None:
        self._function(name, None)(*map(_native, arguments))

    def number(self, name: str, *arguments: Argument) -> int:
        return int(self._function(name, ctypes.c_int64)(*map(_native, arguments)))

    def _function(self, name: str, result: type[ctypes.c_int64] | None) -> ctypes._NamedFuncPointer:
        found = self._library[name]
        found.restype = result
        return found


def _native(argument: Argument) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_int64(argument or 0)


def normal(*shape: int) -> Floats:
    return RANDOM.standard_normal(shape).astype(np.float32)


def poisoned(*shape: int) -> Floats:
    return np.full(shape, np.nan, dtype=np.float32)


def spread(shape: Sequence[int], gap: int) -> Floats:
    """Random rows of the last axis that lie `gap` apart, in memory that ends with the last row."""
    *outer, size = shape
    stride = size + gap
    memory = normal(int(np.prod(outer)) * stride - gap)
    strides = [4 * stride * int(np.prod(outer[axis + 1 :])) for axis in range(len(outer))]
    return np.lib.stride_tricks.as_strided(memory, shape, [*strides, 4])


def placed(array: Floats) -> list[Argument]:
    """An array, and in elements the strides of all axes but the last."""
    return [array, *(stride // 4 for stride in array.strides[:-1])]


def close(got: NDArray[np.floating], expected: NDArray[np.floating]) -> None:
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def norm_reference(x: Floats, weight: Floats) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    normed: NDArray[np.float64] = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    return normed


def rotated(x: Floats, positions: NDArray[np.int64], cos: Floats, sin: Floats) -> Floats:
    half = cos.shape[1]
    c, s = cos[positions][:, None], sin[positions][:, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * half :]], axis=-1)


def check_elementwise(library: Library, pool: int) -> None:
    shapes = product([(1, 1), (3, 2), (70, 1)], [1, 7, 24, 33, 577], [0, 3])
    for (tokens, heads), size, gap in shapes:
        x, weight = spread((tokens, heads, size), gap), normal(size)
        out = poisoned(tokens, heads, size)
        at: list[Argument] = [tokens, heads, size, *placed(x)]
        library.call("pb_rms_norm", pool, *at, weight, 1e-5, out)
        close(out, norm_reference(x, weight))

        half = size // 2
        positions = RANDOM.integers(0, 9, tokens)
        cos, sin, out = normal(9, half), normal(9, half), poisoned(tokens, heads, size)
        library.call("pb_rotate", pool, *at, positions, half, cos, sin, out)
        close(out, rotated(x, positions, cos, sin))

        rows, other = spread((tokens, size), gap), spread((tokens, size), gap)
        total = rows + other
        out = poisoned(tokens, size)
        both = placed(rows) + placed(other)
        library.call("pb_silu_mul", pool, tokens, size, *both, out)
        close(out, rows / (1 + np.exp(-rows)) * other)
        library.call("pb_add_rms_norm", pool, tokens, size, *both, weight, 1e-5)
        close(other, total)
        close(rows, norm_reference(total, weight))


@dataclass(frozen=True)
class PackedWeight:
    """A weight of the library, and the memory that it points to."""

    handle: int
    outputs: int
    memory: NDArray[np.generic]

    def product(self, library: Library, pool: int, x: Floats) -> Floats:
        y = poisoned(len(x), self.outputs)
        library.call("pb_weight_multiply", self.handle, pool, len(x), *placed(x), y)
        return y

    def check_rows(self, library: Library, pool: int, weight: Floats) -> None:
        """Its rows are the weight's; one that it does not have is refused."""
        ids, rows = RANDOM.integers(0, self.outputs, 7), poisoned(7, weight.shape[1])
        assert library.number("pb_weight_gather", self.handle, pool, len(ids), ids, rows)
        np.testing.assert_array_equal(rows, weight[ids])
        ids[3] = self.outputs
        found = library.number("pb_weight_gather", self.handle, pool, len(ids), ids, rows)
        assert not found & 0xFFFFFFFF


def packed_floats(library: Library, pool: int, weight: Floats) -> PackedWeight:
    memory = poisoned(library.number("pb_linear_packed_size", *weight.shape))
    handle = library.number("pb_linear_pack", pool, *weight.shape, *placed(weight), memory)
    return PackedWeight(handle, len(weight), memory)


def check_linear(library: Library, pool: int) -> None:
    for outputs, inputs in [(1, 1), (3, 200), (33, 7), (130, 193), (517, 40)]:
        weight = spread((outputs, inputs), 3)
        packed = packed_floats(library, pool, weight)
        for num_rows in (1, 2, 3, 5, 13, 40, 100, 150):
            x = spread((num_rows, inputs), 1)
            y = packed.product(library, pool, x)
            np.testing.assert_allclose(y, x.astype(np.float64) @ weight.T, rtol=1e-4, atol=1e-4)
        packed.check_rows(library, pool, weight)
        library.call("pb_weight_destroy", packed.handle)


def check_sample(library: Library, pool: int) -> None:
    """Greedy rows are the argmax; a filter that leaves one id leaves no choice."""
    for num_rows, vocab_size, gap in product([1, 5], [1, 63, 64, 517, 5000], [0, 5]):
        logits = spread((num_rows, vocab_size), gap)
        for temperature, top_k, top_p, min_p in [
            *((0.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 0, 0.0, 0.0), (1.0, 0, 1.0, 1.0)),
            *((1.0, 0, 1.0, 0.0), (0.5, 9, 0.9, 0.1), (3.0, 4000, 0.99, 0.0), (9.0, 0, 0.95, 0.0)),
        ]:
            columns: list[NDArray[np.generic]] = [
                np.full(num_rows, temperature, dtype=np.float32),
                np.full(num_rows, top_k, dtype=np.int64),
                np.full(num_rows, top_p, dtype=np.float32),
                np.full(num_rows, min_p, dtype=np.float32),
                *(RANDOM.integers(0, 2**62, num_rows) for _ in range(3)),
            ]
            tokens = np.full(num_rows, -1)
            library.call("pb_sample", pool, *logits.shape, *placed(logits), *columns, tokens)
            assert ((tokens >= 0) & (tokens < vocab_size)).all()
            if temperature == 0 or top_k == 1 or top_p == 0 or min_p == 1:
                np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


def pools(library: Library) -> Iterator[int]:
    for num_threads in (1, 2, 4):
        pool = library.number("pb_pool_create", num_threads)
        yield pool
        library.call("pb_pool_destroy", pool)


def main(path: str) -> None:
    library = Library(path)
    for pool in pools(library):
        check_elementwise(library, pool)
        check_linear(library, pool)
        check_sample(library, pool)


if __name__ == "__main__":
    main(sys.argv[1])
