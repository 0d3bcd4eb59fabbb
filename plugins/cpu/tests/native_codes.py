"""Calls linear layers on weights in codes of a built library, in the manner of native_calls.py.

python -m tests.native_codes libpegboard_cpu.so
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tests.native_calls import RANDOM, Floats, Library, PackedWeight, pools, spread

CONSTANT, WHOLE, FRACTION, MINIMA, MINIMA_HALF = range(5)
"""`Offsets` of native/codes.h."""

LINE = 64


@dataclass(frozen=True)
class CodesKind:
    """The parts of a packed weight, beside its shape."""

    bits: int
    whole_inputs: bool
    group_size: int
    offsets: int = MINIMA
    half_scales: bool = False
    shuffled: bool = False


class Codes:
    """A random weight in codes.

    Attributes:
        values: the dequantized weight.
    """

    def __init__(self, kind: CodesKind, outputs: int, inputs: int) -> None:
        self.kind = kind
        self.shape = (outputs, inputs)
        low, high = (0, 16) if kind.bits == 4 else (-128, 128)
        memory = RANDOM.integers(low, high, outputs * (inputs + 3) - 3).astype(np.int8)
        self.codes = np.lib.stride_tricks.as_strided(memory, self.shape, (inputs + 3, 1))
        sizes = [kind.group_size] * (inputs // kind.group_size)
        sizes += [inputs % kind.group_size] * (inputs % kind.group_size > 0)
        self.ends = np.cumsum(sizes).astype(np.int32)
        self.order = RANDOM.permutation(inputs).astype(np.int32) if kind.shuffled else None
        groups = (outputs, len(sizes))
        of_scales = np.float16 if kind.half_scales else np.float32
        self.scales = (0.5 + RANDOM.random(groups)).astype(of_scales)
        self.zero = -3 if kind.offsets == CONSTANT else 0
        self.offsets = self._offsets(groups)
        self.values = self._values(np.repeat(np.arange(len(sizes)), sizes))

    def packed(self, library: Library, pool: int) -> PackedWeight:
        kind = self.kind
        handle = library.number(
            "pb_codes_create",
            *(*self.shape, kind.bits, kind.whole_inputs, len(self.ends), self.ends, self.order),
            *(kind.half_scales, kind.offsets, self.zero),
        )
        size = library.number("pb_codes_size", handle)
        # vectors of the library begin at cache lines
        whole = np.full(size + LINE, 0x55, dtype=np.uint8)
        memory = whole[-whole.ctypes.data % LINE :][:size]
        stride = self.codes.strides[0]
        library.call(
            "pb_codes_pack",
            *(handle, pool, memory, self.codes, stride, self.scales, self.offsets),
        )
        return PackedWeight(handle, self.shape[0], memory)

    def _offsets(self, groups: tuple[int, int]) -> NDArray[np.generic] | None:
        fractions = RANDOM.standard_normal(groups)
        return {
            CONSTANT: None,
            WHOLE: RANDOM.integers(-20, 20, groups).astype(np.int16),
            FRACTION: fractions.astype(np.float32),
            MINIMA: fractions.astype(np.float32),
            MINIMA_HALF: fractions.astype(np.float16),
        }[self.kind.offsets]

    def _values(self, group: NDArray[np.int64]) -> Floats:
        places = np.empty_like(group)
        places[np.arange(self.shape[1]) if self.order is None else self.order] = group
        values = self.codes.astype(np.float32)
        minima = self.kind.offsets in (MINIMA, MINIMA_HALF)
        offsets = None if self.offsets is None else self.offsets.astype(np.float32)[:, places]
        if not minima:
            values = values - (np.float32(self.zero) if offsets is None else offsets)
        values = values * self.scales.astype(np.float32)[:, places]
        return values + offsets if minima and offsets is not None else values


def kinds() -> Iterator[CodesKind]:
    for bits, whole_inputs, group_size in product((4, 8), (True, False), (16, 32, 24, 8)):
        for offsets in range(5):
            shuffled = (offsets + group_size // 8) % 3 == 0
            yield CodesKind(bits, whole_inputs, group_size, offsets, offsets % 2 == 1, shuffled)
        yield CodesKind(bits, whole_inputs, 10**6, CONSTANT)


def check_codes(library: Library, pool: int) -> None:
    for kind, (outputs, inputs) in product(kinds(), [(1, 1), (35, 70), (16, 128), (53, 200)]):
        weight = Codes(kind, outputs, inputs)
        packed = weight.packed(library, pool)
        x = spread((100, inputs), 3)
        whole = packed.product(library, pool, x)
        expected = x.astype(np.float64) @ weight.values.T
        # int8 inputs are within half a scale, amax / 127, of what they were
        error = np.abs(x).max() / 254 if kind.whole_inputs else 2e-6
        bound = error * np.abs(weight.values).sum(axis=1) + 1e-3
        assert (np.abs(whole - expected) <= bound).all()
        for num_rows in (1, 2, 5, 12, 13, 40):
            rows = packed.product(library, pool, x[-num_rows:])
            np.testing.assert_array_equal(rows, whole[-num_rows:])
        packed.check_rows(library, pool, weight.values)
        library.call("pb_weight_destroy", packed.handle)


def main(path: str) -> None:
    library = Library(path)
    for pool in pools(library):
        check_codes(library, pool)


if __name__ == "__main__":
    main(sys.argv[1])
