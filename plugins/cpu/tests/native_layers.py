"""Calls attention and decoder layers of a built library, in the manner of native_calls.py.

python -m tests.native_layers libpegboard_cpu.so
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tests.native_calls import (
    RANDOM,
    Argument,
    Floats,
    Library,
    PackedWeight,
    close,
    normal,
    packed_floats,
    placed,
    poisoned,
    pools,
    rotated,
    spread,
)
from tests.native_codes import Codes, CodesKind

LARGEST = {1: np.float32(127), 2: np.float32(448)}
"""Of each encoding, as the library numbers them: what the largest number of a head becomes."""


@dataclass(frozen=True)
class AttentionShape:
    """A layer: query heads a KV head, and what KVGroup says."""

    group: int
    num_kv_heads: int
    head_dim: int
    window: int
    soft_cap: float


class PagedRows:
    """Rows of tokens in blocks of one layer, and all their keys and values in the open.

    Args:
        library, handle: whose attention it is.
        shape: what it was made with.
        table: block ids [num_rows, max_blocks].
        read_back: what blocks give back of a token's heads [num_kv_heads, head_dim].
    """

    def __init__(
        self,
        library: Library,
        handle: int,
        shape: AttentionShape,
        table: NDArray[np.int32],
        read_back: Callable[[Floats], Floats] = np.asarray,
    ) -> None:
        self.library = library
        self.handle = handle
        self.shape = shape
        self.table = table
        self.read_back = read_back
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
        num_angles = int(positions.max()) + 1
        cos, sin = normal(num_angles, half), normal(num_angles, half)
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
            self.keys[row].append(self.read_back(k[t]))
            self.values[row].append(self.read_back(v[t]))
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


class Blocks:
    """Zeroed blocks of layers that share a KV group, and the attention that is over them.

    Args:
        encoding: as the library numbers them.
        fixed: static scales, one a KV head; None: a token's own.

    Attributes:
        handle: what the library knows the attention by.
        keys, values: of each layer, [block, kv_head, ...].
        table: the block ids of three rows, none of them 0, in no order.
    """

    def __init__(
        self,
        library: Library,
        pool: int,
        shape: AttentionShape,
        block_size: int,
        num_blocks: int,
        num_layers: int = 1,
        encoding: int = 0,
        fixed: Floats | None = None,
    ) -> None:
        heads, head_dim = shape.num_kv_heads, shape.head_dim
        padded_dim = (head_dim + 15) // 16 * 16
        blocks = (num_layers, 3 * num_blocks + 1, heads)
        kept = np.uint8 if encoding else np.float32
        self.keys = np.zeros((*blocks, head_dim, block_size), kept)
        self.values = np.zeros((*blocks, block_size, padded_dim), kept)
        self.scales = np.zeros((2, *blocks, block_size), np.float32)
        self.table = 1 + RANDOM.permutation(3 * num_blocks).astype(np.int32).reshape(3, num_blocks)
        self.handle = library.number("pb_attention_create", pool)
        sizes = (heads, head_dim, padded_dim, block_size, shape.window, shape.group, 0)
        library.call("pb_attention_add_group", self.handle, *sizes)
        layer = (0, shape.group * heads, float(head_dim**-0.5), shape.soft_cap)
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            library.call("pb_attention_add_layer", self.handle, *layer, keys, values)
            if encoding:
                scales = (self.scales[0, i], self.scales[1, i], fixed, fixed)
                library.call("pb_attention_encode_layer", self.handle, encoding, *scales)


def check_attention(library: Library, pool: int) -> None:
    for (group, num_kv_heads), head_dim, block_size, (window, soft_cap) in product(
        [(1, 1), (3, 2)], [24, 64, 80], [1, 16], [(0, 0.0), (7, 3.0)]
    ):
        shape = AttentionShape(group, num_kv_heads, head_dim, window, soft_cap)
        blocks = Blocks(library, pool, shape, block_size, 96 // block_size)
        rows = PagedRows(library, blocks.handle, shape, blocks.table)
        rows.step([5, 37, 1])
        rows.step([3, 1, 40])
        tree = ancestors_of_chains([1, 5, 1])
        # two children of the first node, and one more of each
        for node, parent in ((1, 0), (2, 0), (3, 1), (4, 2)):
            tree[1 + node] = tree[1 + parent]
            tree[1 + node, node] = 1
        rows.step([1, 5, 1], tree)
        check_moves(library, blocks.handle, blocks.keys[0], blocks.values[0], block_size)
        library.call("pb_attention_destroy", blocks.handle)


def check_long_attention(library: Library, pool: int) -> None:
    """Rows of four tiles and fewer, of which threads share out the tiles where tokens are few."""
    for head_dim, block_size, window, soft_cap in [
        *((24, 1, 0, 0.0), (80, 16, 0, 0.0)),
        *((24, 16, 140, 3.0), (80, 1, 140, 3.0)),
    ]:
        shape = AttentionShape(3, 2, head_dim, window, soft_cap)
        blocks = Blocks(library, pool, shape, block_size, 208 // block_size)
        rows = PagedRows(library, blocks.handle, shape, blocks.table)
        rows.step([70, 203, 1])
        for _ in range(3):
            rows.step([1, 1, 1])
        library.call("pb_attention_destroy", blocks.handle)


def read_back(encoding: int, fixed: Floats | None, x: Floats) -> Floats:
    """Heads as codes give them back."""
    largest = LARGEST[encoding]
    scale = np.abs(x).max(-1) / largest if fixed is None else fixed
    numbers = (x / scale[:, None]).clip(-largest, largest)
    exponents = np.frexp(numbers)[1]
    step = np.ldexp(np.float32(1), np.maximum(exponents - 4, -9) if encoding == 2 else 0)
    read: Floats = np.rint(numbers / step) * step * scale[:, None]
    return read


def check_encoded_attention(library: Library, pool: int) -> None:
    for encoding, head_dim, block_size, static in product(
        [1, 2], [24, 80], [1, 16, 20], [False, True]
    ):
        shape = AttentionShape(3, 2, head_dim, 0, 0.0)
        fixed = np.array([2, 5], np.float32) / LARGEST[encoding] if static else None
        num_blocks = -(-210 // block_size)
        blocks = Blocks(library, pool, shape, block_size, num_blocks, 1, encoding, fixed)
        back = partial(read_back, encoding, fixed)
        rows = PagedRows(library, blocks.handle, shape, blocks.table, back)
        rows.step([5, 203, 1])
        rows.step([1, 1, 40])
        tree = ancestors_of_chains([1, 3, 1])
        tree[3] = tree[1]
        tree[3, 2] = 1
        rows.step([1, 3, 1], tree)
        check_encoded_moves(library, blocks, block_size)
        library.call("pb_attention_destroy", blocks.handle)


def check_encoded_moves(library: Library, blocks: Blocks, block_size: int) -> None:
    """Codes and scales go together."""
    keys, values, scales = blocks.keys[0], blocks.values[0], blocks.scales[:, 0]
    num_slots = len(keys) * block_size
    source, target = RANDOM.permutation(num_slots)[:14].reshape(2, 7).copy()

    def by_slot() -> list[NDArray[np.generic]]:
        """Everything that blocks keep of slots."""
        of_slots = (keys.transpose(0, 3, 1, 2), values.transpose(0, 2, 1, 3))
        kept = [*of_slots, *(of_heads.transpose(0, 2, 1) for of_heads in scales)]
        return [array.reshape(num_slots, -1).copy() for array in kept]

    wanted = by_slot()
    for array in wanted:
        array[target] = array[source]
    library.call("pb_attention_move_slots", blocks.handle, 0, 7, source, target)
    for got, expected in zip(by_slot(), wanted, strict=True):
        np.testing.assert_array_equal(got, expected)
    library.call("pb_attention_copy_blocks", blocks.handle, 0, 1, np.array([3]), np.array([1]))
    for array in (keys, values, *scales):
        np.testing.assert_array_equal(array[1], array[3])


def check_moves(
    library: Library, handle: int, keys: Floats, values: Floats, block_size: int
) -> None:
    num_slots = len(keys) * block_size
    source, target = RANDOM.permutation(num_slots)[:14].reshape(2, 7).copy()
    flat = keys.transpose(0, 3, 1, 2).reshape(num_slots, -1).copy()
    flat[target] = flat[source]
    library.call("pb_attention_move_slots", handle, 0, 7, source, target)
    np.testing.assert_array_equal(keys.transpose(0, 3, 1, 2).reshape(num_slots, -1), flat)
    blocks = np.array([3, 1]), np.array([0, 3])
    wanted = keys[1].copy(), values[1].copy()
    library.call("pb_attention_copy_blocks", handle, 0, 2, *blocks)
    np.testing.assert_array_equal(keys[3], wanted[0])
    np.testing.assert_array_equal(values[3], wanted[1])


class LayerWeights:
    """Random weights of a decoder layer, packed, as the library's functions take them."""

    def __init__(
        self, library: Library, pool: int, shape: AttentionShape, hidden_size: int, mlp_size: int
    ) -> None:
        self.library = library
        self.pool = pool
        self.shape = shape
        self.num_heads = shape.group * shape.num_kv_heads
        self.hidden_size = hidden_size
        self.mlp_size = mlp_size
        self._weights: list[PackedWeight] = []
        attended_size = self.num_heads * shape.head_dim
        qkv_size = attended_size + 2 * shape.num_kv_heads * shape.head_dim
        self.qkv = self._packed(qkv_size, hidden_size)
        self.o = self._packed(hidden_size, attended_size)
        self.gate_up = self._packed(2 * mlp_size, hidden_size)
        self.down = self._packed(hidden_size, mlp_size)
        self.norm, self.next_norm = normal(2, hidden_size)

    def _packed(self, outputs: int, inputs: int) -> PackedWeight:
        """Of a format that the others do not have."""
        number = len(self._weights)
        weight = normal(outputs, inputs) * np.float32(inputs**-0.5)
        if number == 0:
            packed = packed_floats(self.library, self.pool, weight)
        else:
            kind = CodesKind(bits=4 if number == 1 else 8, whole_inputs=number < 3, group_size=16)
            packed = Codes(kind, outputs, inputs).packed(self.library, self.pool)
        self._weights.append(packed)
        return packed

    def destroy(self) -> None:
        for weight in self._weights:
            self.library.call("pb_weight_destroy", weight.handle)

    def create(self, layer: int, rotary: Sequence[Argument]) -> int:
        heads = (self.num_heads, self.shape.num_kv_heads, self.shape.head_dim)
        weights = (weight.handle for weight in (self.qkv, self.o, self.gate_up, self.down))
        norms = (self.norm, self.next_norm, 1e-5)
        return self.library.number(
            "pb_decoder_layer_create", layer, *heads, *weights, *norms, *rotary
        )

    def one_by_one(
        self, attention: int, layer: int, rotary: Sequence[Argument], x: Floats, residual: Floats
    ) -> Floats:
        """The normed residual after the layer, by a call for each operation; adds to the residual."""
        shape, tokens = self.shape, len(x)
        qkv = self._linear(x, self.qkv).reshape(tokens, -1, shape.head_dim)
        q, k, v = np.split(qkv, [self.num_heads, self.num_heads + shape.num_kv_heads], axis=1)
        attended = poisoned(tokens, self.num_heads * shape.head_dim)
        inputs = placed(q) + placed(k) + placed(v)
        self.library.call(
            "pb_attention_forward", attention, layer, *inputs, *rotary, attended, None
        )
        x = self._linear(attended, self.o)
        self._add_norm(x, residual, self.norm)
        gate, up = np.split(self._linear(x, self.gate_up), 2, axis=1)
        product = poisoned(tokens, self.mlp_size)
        both = placed(gate) + placed(up)
        self.library.call("pb_silu_mul", self.pool, tokens, self.mlp_size, *both, product)
        x = self._linear(product, self.down)
        self._add_norm(x, residual, self.next_norm)
        return x

    def _add_norm(self, x: Floats, residual: Floats, norm: Floats) -> None:
        both = placed(x) + placed(residual)
        self.library.call("pb_add_rms_norm", self.pool, *x.shape, *both, norm, 1e-5)

    def _linear(self, x: Floats, weight: PackedWeight) -> Floats:
        return weight.product(self.library, self.pool, x)


def check_decoder_layer(library: Library, pool: int) -> None:
    """Layers in one call have the bits of their operations, over blocks of other layers."""
    workspace = library.number("pb_workspace_create")
    for group, num_pairs in [(1, 0), (3, 12)]:
        shape = AttentionShape(group, 2, 24, 0, 0.0)
        weights = [LayerWeights(library, pool, shape, 40, mlp_size=37) for _ in range(2)]
        blocks = Blocks(library, pool, shape, 16, 9, num_layers=4)
        angles = normal(2, 136, num_pairs)
        rotary = (angles[0], angles[1], num_pairs) if num_pairs else (None, None, 0)
        layers = np.array([own.create(2 + i, rotary) for i, own in enumerate(weights)])
        computed = 0
        for tokens in (5, 130, 1):  # few, more than a block of rows, and many slots for one
            x, residual = normal(tokens, 40), normal(tokens, 40)
            out, total = x.copy(), residual.copy()
            positions, starts = computed + np.arange(tokens), np.array([0, tokens])
            step = (positions, starts, np.array([computed]), blocks.table, 9, None, 0)
            library.call("pb_attention_prepare", blocks.handle, 0, 1, *step)
            for i, own in enumerate(weights):
                x = own.one_by_one(blocks.handle, i, rotary, x, residual)
            over = (blocks.handle, workspace, tokens)
            library.call("pb_decoder_layers", layers, len(layers), *over, out, total)
            assert np.isfinite(out).all()
            np.testing.assert_array_equal(out, x)
            np.testing.assert_array_equal(total, residual)
            np.testing.assert_array_equal(blocks.keys[2:], blocks.keys[:2])
            np.testing.assert_array_equal(blocks.values[2:], blocks.values[:2])
            computed += tokens
        for layer in layers.tolist():
            library.call("pb_decoder_layer_destroy", layer)
        for own in weights:
            own.destroy()
        library.call("pb_attention_destroy", blocks.handle)
    library.call("pb_workspace_destroy", workspace)


def main(path: str) -> None:
    library = Library(path)
    for pool in pools(library):
        check_attention(library, pool)
        check_long_attention(library, pool)
        check_encoded_attention(library, pool)
        check_decoder_layer(library, pool)


if __name__ == "__main__":
    main(sys.argv[1])
