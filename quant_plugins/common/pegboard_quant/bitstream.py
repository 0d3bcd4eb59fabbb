"""Codes of 1 to 8 bits in 32-bit words: one little-endian stream a row, dense across words.

Code k of a row is in bits k*b to k*b + b - 1 of its stream, and bit i of the stream is bit i % 32 of
word i // 32. Eight codes of b bits fill b bytes, so that all is done on bytes.
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional as F

from pegboard_quant.planning import WORD_BITS, num_words, num_words_apart

_BYTE = 8


def unpack(words: torch.Tensor, bits: int, num_codes: int, axis: int = -1) -> torch.Tensor:
    """The codes of dense streams along an axis.

    Args:
        words: int32, `num_words(num_codes, bits)` of them along the axis.
        bits: 1 to 8.
        num_codes: along the axis.
        axis: that the streams run along.

    Returns:
        uint8, the shape of `words` with `num_codes` along the axis; a view where that is not the last.
    """
    stream = _bytes_of(words, axis)
    groups = -(-num_codes // _BYTE)
    stream = _split(_of_length(stream, groups * bits), bits)
    codes = torch.empty((*stream.shape[:-1], _BYTE), dtype=torch.uint8)
    mask = (1 << bits) - 1
    for index in range(_BYTE):
        byte, offset = divmod(index * bits, _BYTE)
        code = stream[..., byte] >> offset
        if offset + bits > _BYTE:
            code = code | (stream[..., byte + 1] << (_BYTE - offset))
        codes[..., index] = code & mask
    return codes.flatten(-2)[..., :num_codes].movedim(-1, axis)


def pack(codes: torch.Tensor, bits: int, axis: int = -1) -> torch.Tensor:
    """Dense streams of codes along an axis: the inverse of `unpack`; what is left of a word is 0.

    Args:
        codes: uint8, each below 2**bits.
        bits: 1 to 8.
        axis: that the streams run along.

    Returns:
        int32, contiguous.
    """
    rows = codes.movedim(axis, -1)
    width = num_words(rows.shape[-1], bits)
    groups = -(-rows.shape[-1] // _BYTE)
    padded = _split(_of_length(rows, groups * _BYTE), _BYTE)
    stream = torch.zeros((*padded.shape[:-1], bits), dtype=torch.uint8)
    for index in range(_BYTE):
        byte, offset = divmod(index * bits, _BYTE)
        stream[..., byte] |= padded[..., index] << offset
        if offset + bits > _BYTE:
            stream[..., byte + 1] |= padded[..., index] >> (_BYTE - offset)
    filled = _of_length(stream.flatten(-2), width * WORD_BITS // _BYTE)
    words = _little_endian(_seen_as(filled, torch.int32))
    return words.movedim(-1, axis).contiguous()


def unpack_apart(words: torch.Tensor, bits: int, num_codes: int, axis: int = -1) -> torch.Tensor:
    """The codes of words that hold 32 // bits codes each, their upper bits unused.

    Args and result: as `unpack`, of `num_words_apart(num_codes, bits)` words.
    """
    rows = words.movedim(axis, -1)
    mask = (1 << bits) - 1
    codes = [
        ((rows >> (index * bits)) & mask).to(torch.uint8) for index in range(WORD_BITS // bits)
    ]
    return torch.stack(codes, dim=-1).flatten(-2)[..., :num_codes].movedim(-1, axis)


def pack_apart(codes: torch.Tensor, bits: int, axis: int = -1) -> torch.Tensor:
    """The inverse of `unpack_apart`. Args and result: as `pack`."""
    rows = codes.movedim(axis, -1)
    each = WORD_BITS // bits
    width = num_words_apart(rows.shape[-1], bits)
    padded = _split(_of_length(rows, width * each), each).long()
    shifts = torch.arange(each) * bits
    return (padded << shifts).sum(-1).to(torch.int32).movedim(-1, axis).contiguous()


def _bytes_of(words: torch.Tensor, axis: int) -> torch.Tensor:
    return _seen_as(_little_endian(words.movedim(axis, -1).contiguous()), torch.uint8)


def _seen_as(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of each row as another type. They are laid in a line first: an axis of length 1 may have
    any stride, with which torch refuses it."""
    line = rows.contiguous().as_strided((rows.numel(),), (1,))
    return line.view(dtype).view(*rows.shape[:-1], -1)


def _little_endian(words: torch.Tensor) -> torch.Tensor:
    if sys.byteorder == "little":
        return words
    return _split(words.view(torch.uint8), 4).flip(-1).flatten(-2).view(torch.int32)


def _split(rows: torch.Tensor, size: int) -> torch.Tensor:
    """[..., n] -> [..., n / size, size]."""
    return rows.reshape(*rows.shape[:-1], -1, size)


def _of_length(rows: torch.Tensor, length: int) -> torch.Tensor:
    """The first elements of the last axis, and zeros where it is too short."""
    missing = length - rows.shape[-1]
    return F.pad(rows, (0, missing)) if missing > 0 else rows[..., :length]
