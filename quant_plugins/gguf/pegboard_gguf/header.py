"""The header of a GGUF file: metadata and where each tensor lies. No weights are read.

A file comes from anywhere, so every count, length and offset is checked against the file's size
before it is used.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)

from pegboard.errors import CheckpointError
from pegboard.regular_files import MIB, open_regular

VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ITEMS = 2**23
"""Most items of all arrays. Vocabularies have some hundred thousand tokens; an item is an object."""
MAX_STRING_BYTES = 2**22
MAX_BYTES = 128 * MIB
"""Most bytes of metadata and entries of tensors; a vocabulary of 262,144 tokens has 10 MiB."""

_NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file holds it.

    Attributes:
        name: GGUF's name (`blk.0.attn_q.weight`).
        shape: logical shape, rows first (the reverse of the file's order).
        type: ggml's name of the element or block type (`F32`, `Q4_K`).
        offset: of its first byte in the file.
        num_bytes: stored size.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata by key, and tensors by GGUF's name, in the file's order."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Reads and checks the header of one file.

    Raises:
        CheckpointError: not a GGUF file that can be read whole; it names file and fault.
    """
    try:
        with (
            open_regular(path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _parse(_Cursor(data, path))
    except (OSError, ValueError) as error:  # mmap refuses an empty file by ValueError
        raise CheckpointError(f"{path}", f"cannot be read ({error})") from error


class _Cursor:
    """Reads values one after the other; the end of the file is an error with the file's name."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.path = path
        self.size = len(data)
        self.position = 0
        self._data = data
        self._num_items = 0

    def bytes(self, num_bytes: int) -> bytes:
        start = self.position
        if num_bytes > self.size - start:
            raise self.fault(
                f"is truncated: its header goes on after the last byte, {self.size}",
                fix="download the file again",
            )
        self.position = start + num_bytes
        if self.position > MAX_BYTES:
            raise self.fault("has a header that does not end", allowed=f"{MAX_BYTES // MIB} MiB")
        return self._data[start : self.position]

    def uint32(self) -> int:
        return int(struct.unpack("<I", self.bytes(4))[0])

    def uint64(self) -> int:
        return int(struct.unpack("<Q", self.bytes(8))[0])

    def string(self) -> str:
        num_bytes = self.uint64()
        if MAX_STRING_BYTES < num_bytes <= self.size - self.position:
            raise self.fault(
                f"has a text of {num_bytes} bytes in its header", allowed=f"{MAX_STRING_BYTES}"
            )
        return self.bytes(num_bytes).decode("utf-8", errors="replace")

    def value(self, value_type: int) -> Any:
        if value_type == GGUFValueType.STRING:
            return self.string()
        if value_type == GGUFValueType.ARRAY:
            return self._array(self.uint32(), self.uint64())
        return self._numbers(value_type, 1)[0]

    def _array(self, item_type: int, length: int) -> list[Any]:
        self._num_items += length
        if self._num_items > MAX_ITEMS:
            raise self.fault(f"has arrays of {self._num_items} items", allowed=f"{MAX_ITEMS}")
        if item_type == GGUFValueType.STRING:
            return [self.string() for _ in range(length)]
        return self._numbers(item_type, length)

    def _numbers(self, value_type: int, length: int) -> list[Any]:
        if value_type not in _NUMBERS:
            raise self.fault(
                f"has metadata of type {value_type}", allowed="types 0 to 12, unnested"
            )
        dtype = np.dtype(_NUMBERS[GGUFValueType(value_type)])
        values: list[Any] = np.frombuffer(self.bytes(length * dtype.itemsize), dtype).tolist()
        return values

    def fault(self, was: str, *, allowed: str = "", fix: str = "") -> CheckpointError:
        return CheckpointError(f"{self.path}", was, allowed=allowed, fix=fix)


def _parse(cursor: _Cursor) -> Header:
    if cursor.bytes(4) != struct.pack("<I", GGUF_MAGIC):
        raise cursor.fault("is no GGUF file: it does not begin with 'GGUF'")
    version = cursor.uint32()
    if version not in VERSIONS:
        was = f"is GGUF version {version}"
        if version & 0xFFFF == 0:
            was = "is a big-endian GGUF file"
        raise cursor.fault(was, allowed="versions 2 and 3, little-endian")
    num_tensors, num_keys = cursor.uint64(), cursor.uint64()
    metadata = _read_metadata(cursor, num_keys)
    _refuse_split(cursor, metadata)
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise cursor.fault(f"has general.alignment {alignment!r}", allowed="a multiple of 8")
    infos = [_read_info(cursor) for _ in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    return Header(metadata, _place(cursor, infos, start, alignment))


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise cursor.fault(f"has the metadata key {key!r} twice")
        metadata[key] = cursor.value(cursor.uint32())
    return metadata


def _refuse_split(cursor: _Cursor, metadata: dict[str, Any]) -> None:
    count = metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        number = metadata.get("split.no", 0)
        raise cursor.fault(
            f"is one of {count} parts of a split checkpoint (split.no {number})",
            allowed="one whole file",
            fix="llama-gguf-split --merge FIRST_PART WHOLE.gguf",
        )


def _read_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """Name, logical shape, type, offset in the data section."""
    name = cursor.string()
    num_dimensions = cursor.uint32()
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.fault(
            f"has tensor {name!r} of {num_dimensions} dimensions", allowed=f"1 to {MAX_DIMENSIONS}"
        )
    shape = tuple(reversed([cursor.uint64() for _ in range(num_dimensions)]))
    type_id = cursor.uint32()
    try:
        ggml_type = GGMLQuantizationType(type_id)
    except ValueError:
        raise cursor.fault(
            f"has tensor {name!r} of the unknown type {type_id}", fix="pip install --upgrade gguf"
        ) from None
    return name, shape, ggml_type, cursor.uint64()


def _place(
    cursor: _Cursor,
    infos: Iterable[tuple[str, tuple[int, ...], GGMLQuantizationType, int]],
    start: int,
    alignment: int,
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name, shape, ggml_type, offset in infos:
        if name in tensors:
            raise cursor.fault(f"has tensor {name!r} twice")
        block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
        if min(shape) < 1 or shape[-1] % block_size:
            raise cursor.fault(
                f"has tensor {name!r} of shape {shape} in {ggml_type.name}",
                allowed=f"rows of a multiple of {block_size} weights",
            )
        if block_size > 1 and len(shape) == 1:
            raise cursor.fault(
                f"has the vector {name!r} in {ggml_type.name}", allowed="F32, F16, BF16, F64"
            )
        if offset % alignment:
            raise cursor.fault(
                f"has tensor {name!r} at offset {offset}", allowed=f"a multiple of {alignment}"
            )
        num_bytes = math.prod(shape) // block_size * block_bytes
        tensors[name] = StoredTensor(name, shape, ggml_type.name, start + offset, num_bytes)
    _check_extents(cursor, tensors.values())
    return tensors


def _check_extents(cursor: _Cursor, tensors: Iterable[StoredTensor]) -> None:
    end, previous = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise cursor.fault(f"has tensors {previous!r} and {tensor.name!r} in the same bytes")
        end, previous = tensor.offset + tensor.num_bytes, tensor.name
        if end > cursor.size:
            raise cursor.fault(
                f"is truncated: tensor {tensor.name!r} ends at byte {end}, the file at {cursor.size}",
                fix="download the file again",
            )
