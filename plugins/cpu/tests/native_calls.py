"""Calls every function of a built library at odd shapes, with numpy alone, and checks what it wrote.

    python native_calls.py libpegboard_cpu.so

Made to run under a sanitizer: arrays are exactly as large as what a function may touch, so that one
element more is an error, and nothing but this file and numpy is in the process.
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


def check_linear(library: Library, pool: int) -> None:
    for outputs, inputs in [(1, 1), (3, 200), (33, 7), (130, 193), (517, 40)]:
        weight = spread((outputs, inputs), 3)
        packed = poisoned(library.number("pb_linear_packed_size", outputs, inputs))
        library.call("pb_linear_pack", pool, outputs, inputs, *placed(weight), packed)
        for num_rows in (1, 2, 3, 5, 13, 40, 100):
            x, y = spread((num_rows, inputs), 1), poisoned(num_rows, outputs)
            library.call("pb_linear", pool, num_rows, outputs, inputs, *placed(x), packed, y)
            np.testing.assert_allclose(y, x.astype(np.float64) @ weight.T, rtol=1e-4, atol=1e-4)
        ids, rows = RANDOM.integers(0, outputs, 7), poisoned(7, inputs)
        shape = (len(ids), outputs, inputs)
        assert library.number("pb_linear_gather", pool, *shape, packed, ids, rows)
        np.testing.assert_array_equal(rows, weight[ids])
        ids[3] = outputs
        assert not library.number("pb_linear_gather", pool, *shape, packed, ids, rows) & 0xFFFFFFFF


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


@dataclass(frozen=True)
class AttentionShape:
    """A layer: query heads a KV head, and what KVGroup says."""

    group: int
    num_kv_heads: int
    head_dim: int
    window: int
    soft_cap: float


class PagedRows:
    """Rows of tokens in pages of one layer, and all their keys and values in the open.

    Args:
        library, handle: whose attention it is.
        shape: what it was made with.
        table: page ids [num_rows, max_blocks].
    """

    def __init__(
        self, library: Library, handle: int, shape: AttentionShape, table: NDArray[np.int32]
    ) -> None:
        self.library = library
        self.handle = handle
        self.shape = shape
        self.table = table
        self.keys: list[list[Floats]] = [[] for _ in table]
        self.values: list[list[Floats]] = [[] for _ in table]
        self.positions: list[list[int]] = [[] for _ in table]

    def step(self, lengths: Sequence[int], trees: NDArray[np.uint8] | None = None) -> None:
        """Feeds as many tokens to each row, and compares with the formula."""
        shape = self.shape
        num_heads = shape.group * shape.num_kv_heads
        computed = np.array([len(row) for row in self.keys])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.repeat(np.arange(len(lengths)), lengths)
        seen = ancestors_of_chains(lengths) if trees is None else trees
        positions = computed[rows] + seen.sum(axis=1, dtype=np.int64) - 1
        q, k, v = (
            spread((len(rows), heads, shape.head_dim), 2)
            for heads in (num_heads, shape.num_kv_heads, shape.num_kv_heads)
        )
        half = shape.head_dim // 2
        cos, sin = normal(64, half), normal(64, half)
        self.library.call(
            "pb_attention_prepare",
            *(self.handle, 0, len(lengths), positions, starts, computed),
            *(self.table, self.table.shape[1], trees, seen.shape[1]),
        )
        out, lse = poisoned(len(rows), num_heads, shape.head_dim), poisoned(len(rows), num_heads)
        inputs = placed(q) + placed(k) + placed(v)
        self.library.call("pb_attention_forward", self.handle, 0, *inputs, cos, sin, half, out, lse)
        q, k = rotated(q, positions, cos, sin), rotated(k, positions, cos, sin)
        for t, row in enumerate(rows.tolist()):
            self.keys[row].append(k[t])
            self.values[row].append(v[t])
            self.positions[row].append(int(positions[t]))
            own = computed[row] + np.flatnonzero(seen[t, : t - starts[row] + 1])
            expected = self.attended(q[t], row, [*range(computed[row]), *own])
            close(out[t], expected[0])
            close(lse[t], expected[1])

    def attended(self, q: Floats, row: int, slots: Sequence[int]) -> tuple[Floats, Floats]:
        """Output and log of the sum of exponentials of a row's last token, which sees the slots."""
        shape = self.shape
        at = self.positions[row]
        slots = [slot for slot in slots if not shape.window or at[-1] - at[slot] < shape.window]
        keys, values = (
            np.stack([of[row][slot] for slot in slots]).repeat(shape.group, axis=1)
            for of in (self.keys, self.values)
        )
        scores = np.einsum("hd,shd->hs", q, keys) * shape.head_dim**-0.5
        if shape.soft_cap:
            scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
        weights = np.exp(scores)
        total = weights.sum(axis=1)
        return np.einsum("hs,shd->hd", weights, values) / total[:, None], np.log(total)


def ancestors_of_chains(lengths: Sequence[int]) -> NDArray[np.uint8]:
    """Each token sees its row's earlier ones, as those of no tree do."""
    seen = np.zeros((sum(lengths), max(lengths)), dtype=np.uint8)
    token = 0
    for length in lengths:
        seen[token : token + length, :length] = np.tri(length, dtype=np.uint8)
        token += length
    return seen


def check_attention(library: Library, pool: int) -> None:
    for (group, num_kv_heads), head_dim, block_size, (window, soft_cap) in product(
        [(1, 1), (3, 2)], [24, 64, 80], [1, 16], [(0, 0.0), (7, 3.0)]
    ):
        shape = AttentionShape(group, num_kv_heads, head_dim, window, soft_cap)
        padded_dim = (head_dim + 15) // 16 * 16
        num_blocks = 96 // block_size
        keys = np.zeros((3 * num_blocks + 1, num_kv_heads, head_dim, block_size), np.float32)
        values = np.zeros((3 * num_blocks + 1, num_kv_heads, block_size, padded_dim), np.float32)
        handle = library.number("pb_attention_create", pool)
        sizes = (num_kv_heads, head_dim, padded_dim, block_size, window, group)
        library.call("pb_attention_add_group", handle, *sizes)
        layer = (0, group * num_kv_heads, float(head_dim**-0.5), soft_cap, keys, values)
        library.call("pb_attention_add_layer", handle, *layer)
        table = 1 + RANDOM.permutation(3 * num_blocks).astype(np.int32).reshape(3, num_blocks)
        rows = PagedRows(library, handle, shape, table)
        rows.step([5, 37, 1])
        rows.step([3, 1, 40])
        tree = ancestors_of_chains([1, 5, 1])
        # two children of the first node, and one more of each
        for node, parent in ((1, 0), (2, 0), (3, 1), (4, 2)):
            tree[1 + node] = tree[1 + parent]
            tree[1 + node, node] = 1
        rows.step([1, 5, 1], tree)
        check_moves(library, handle, keys, values, block_size)
        library.call("pb_attention_destroy", handle)


def check_moves(
    library: Library, handle: int, keys: Floats, values: Floats, block_size: int
) -> None:
    num_slots = len(keys) * block_size
    source, target = RANDOM.permutation(num_slots)[:14].reshape(2, 7).copy()
    flat = keys.transpose(0, 3, 1, 2).reshape(num_slots, -1).copy()
    flat[target] = flat[source]
    library.call("pb_attention_move_slots", handle, 0, 7, source, target)
    np.testing.assert_array_equal(keys.transpose(0, 3, 1, 2).reshape(num_slots, -1), flat)
    pages = np.array([3, 1]), np.array([0, 3])
    wanted = keys[1].copy(), values[1].copy()
    library.call("pb_attention_copy_pages", handle, 0, 2, *pages)
    np.testing.assert_array_equal(keys[3], wanted[0])
    np.testing.assert_array_equal(values[3], wanted[1])


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
        check_attention(library, pool)


if __name__ == "__main__":
    main(sys.argv[1])
