"""Blocks as codes and their groups' numbers: the layouts of ggml's types, read without arithmetic on
weights.

With `LinearWeight`'s formula the numbers give, bit for bit, what the gguf library dequantizes to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Blocks = NDArray[np.void]
"""Blocks of one of the dtypes below."""

_CHUNK_WEIGHTS = 2**18  # unpacked at a time, so that what lies between stays in the cache
_KSCALES = ("scales", "u1", 12)

_LAYOUTS: dict[str, np.dtype[np.void]] = {
    "Q4_0": np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    "Q4_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]),
    "Q5_0": np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q5_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q8_0": np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    "Q4_K": np.dtype([("d", "<f2"), ("dmin", "<f2"), _KSCALES, ("qs", "u1", (4, 32))]),
    "Q5_K": np.dtype(
        [("d", "<f2"), ("dmin", "<f2"), _KSCALES, ("qh", "u1", 32), ("qs", "u1", (4, 32))]
    ),
    "Q6_K": np.dtype(
        [("ql", "u1", (2, 2, 32)), ("qh", "u1", (2, 32)), ("scales", "i1", 16), ("d", "<f2")]
    ),
}


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A weight of one block format.

    Attributes:
        codes: [rows, weights], uint8 or int8.
        scales: float32 [rows, groups].
        minima: the same; None: the format has none.
    """

    codes: NDArray[Any]
    scales: Floats
    minima: Floats | None


def unpack(stored: Bytes, block_format: str, num_weights: int) -> Unpacked:
    """The codes and numbers of a matrix in blocks.

    Args:
        stored: uint8 [rows, bytes].
        block_format: a key of `PACKED_FORMS`.
        num_weights: of a row.
    """
    blocks = stored.view(_LAYOUTS[block_format])
    unpack_codes = _CODES[block_format]
    codes = np.empty((len(blocks), num_weights), unpack_codes(blocks[:1]).dtype)
    step = max(1, _CHUNK_WEIGHTS // num_weights)
    for start in range(0, len(blocks), step):
        chunk = unpack_codes(blocks[start : start + step])
        codes[start : start + step] = chunk.reshape(len(chunk), num_weights)
    with np.errstate(all="ignore"):  # damaged scales are reported where they are checked
        scales, minima = _NUMBERS[block_format](blocks)
    return Unpacked(codes, scales, minima)


def _nibbles(qs: Bytes) -> Bytes:
    """[..., n] -> [..., 2, n]: the low nibbles of a run of bytes, then the high ones."""
    codes = np.empty((*qs.shape[:-1], 2, qs.shape[-1]), np.uint8)
    np.bitwise_and(qs, 0x0F, out=codes[..., 0, :])
    np.right_shift(qs, 4, out=codes[..., 1, :])
    return codes


def _four_bits(blocks: Blocks) -> Bytes:
    return _nibbles(blocks["qs"])


def _eight_bits(blocks: Blocks) -> NDArray[np.int8]:
    codes: NDArray[np.int8] = blocks["qs"]
    return codes


def _five_bits(blocks: Blocks) -> Bytes:
    """0 to 31; bit j of `qh` is the fifth of weight j."""
    fifth = np.unpackbits(blocks["qh"], axis=-1, bitorder="little")
    codes: Bytes = _nibbles(blocks["qs"]).reshape(fifth.shape) | (fifth << np.uint8(4))
    return codes


def _five_bits_centred(blocks: Blocks) -> NDArray[np.int8]:
    return _five_bits(blocks).view(np.int8) - np.int8(16)


def _five_bits_unsigned(blocks: Blocks) -> NDArray[np.int8]:
    return _five_bits(blocks).view(np.int8)


def _five_bits_of_k(blocks: Blocks) -> NDArray[np.int8]:
    """0 to 31; bit s of byte l of `qh` is the fifth of weight l of run s of 32."""
    fifth = (blocks["qh"][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    codes: Bytes = _nibbles(blocks["qs"]).reshape(fifth.shape) | (fifth << np.uint8(4))
    return codes.view(np.int8)


def _six_bits(blocks: Blocks) -> NDArray[np.int8]:
    """-32 to 31. Of each half of 128 weights, `ql` has in its low nibbles the first two runs of 32 and
    in its high ones the others; two bits of `qh` belong to each run."""
    low, high = blocks["ql"] & 0x0F, blocks["ql"] >> 4
    runs = np.concatenate([low, high], axis=-2)
    upper = (blocks["qh"][..., None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & np.uint8(
        3
    )
    codes: Bytes = runs | (upper << np.uint8(4))
    return codes.view(np.int8) - np.int8(32)


def _scale(blocks: Blocks) -> tuple[Floats, None]:
    return blocks["d"].astype(np.float32), None


def _scale_and_minimum(blocks: Blocks) -> tuple[Floats, Floats]:
    return blocks["d"].astype(np.float32), blocks["m"].astype(np.float32)


def _scales_and_minima_of_k(blocks: Blocks) -> tuple[Floats, Floats]:
    """Six bits each, of eight groups: the first four in a byte each, whose upper two bits and a nibble
    make the others."""
    first, second, nibbles = np.split(blocks["scales"], 3, axis=-1)
    upper = np.uint8(0x30)
    scales = np.concatenate([first & 0x3F, (nibbles & 0x0F) | ((first >> 2) & upper)], axis=-1)
    minima = np.concatenate([second & 0x3F, (nibbles >> 4) | ((second >> 2) & upper)], axis=-1)
    return (
        _by_block(blocks["d"], scales.astype(np.float32)),
        -_by_block(blocks["dmin"], minima.astype(np.float32)),
    )


def _scales_of_k(blocks: Blocks) -> tuple[Floats, None]:
    return _by_block(blocks["d"], blocks["scales"].astype(np.float32)), None


def _by_block(factor: NDArray[np.float16], numbers: Floats) -> Floats:
    """[rows, blocks] times [rows, blocks, groups] -> [rows, blocks * groups]; exact in float32."""
    product: Floats = factor.astype(np.float32)[..., None] * numbers
    return product.reshape(len(product), -1)


_CODES: dict[str, Callable[[Blocks], NDArray[Any]]] = {
    "Q4_0": _four_bits,
    "Q4_1": _four_bits,
    "Q5_0": _five_bits_centred,
    "Q5_1": _five_bits_unsigned,
    "Q8_0": _eight_bits,
    "Q4_K": _four_bits,
    "Q5_K": _five_bits_of_k,
    "Q6_K": _six_bits,
}
_NUMBERS: dict[str, Callable[[Blocks], tuple[Floats, Floats | None]]] = {
    "Q4_0": _scale,
    "Q4_1": _scale_and_minimum,
    "Q5_0": _scale,
    "Q5_1": _scale_and_minimum,
    "Q8_0": _scale,
    "Q4_K": _scales_and_minima_of_k,
    "Q5_K": _scales_and_minima_of_k,
    "Q6_K": _scales_of_k,
}
