"""Dequantized weights: made by the gguf library, kept as safetensors in the cache."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts, CheckpointSource
from pegboard_gguf.cache import Cache, group_of

_CHUNK_WEIGHTS = 2**22  # dequantized at a time, so that a large tensor takes little memory
_DTYPE_NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
_ALIGNMENT = 64


def dequantize(blocks: torch.Tensor, block_format: str) -> torch.Tensor:
    """float32 [rows, weights] of blocks, uint8 [rows, bytes]."""
    with np.errstate(all="ignore"):  # damaged scales are reported by `check_finite`
        values = gguf_dequantize(blocks.numpy(), GGMLQuantizationType[block_format])
    return torch.from_numpy(values)


class DequantizedWeights:
    """The block-format tensors of a file in one dtype, from the cache or put there now.

    Where the cache takes no entry, `get` has nothing, and the caller dequantizes for itself.

    Args:
        facts: the file's.
        dtype: of the weights.
        cache: where they are kept.
        open_source: opens the file; called only when the cache does not have its weights.

    Raises:
        CheckpointError: a tensor holds numbers that are not finite.
    """

    def __init__(
        self,
        facts: CheckpointFacts,
        dtype: str,
        cache: Cache,
        open_source: Callable[[CheckpointFacts], CheckpointSource],
    ) -> None:
        self._cache = cache
        self._name = f"{group_of(facts.fingerprint)}-{dtype}.safetensors"
        self._layout = _Layout(facts, dtype)
        self._file: Any = self._open(cache.find(self._name))
        if self._file is None:
            source = open_source(facts)
            self._file = self._open(self._convert(source, facts))
            source.close()

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor, [rows, weights]; None: not in the cache, or damaged there."""
        if self._file is None:
            return None
        try:
            values: torch.Tensor = self._file.get_tensor(name)
            checksum = int(json.loads(self._file.metadata()["crc32"])[name], 16)
        except (SafetensorError, KeyError, TypeError, ValueError):
            checksum = None
        if (
            checksum is None
            or (tuple(values.shape), values.dtype)
            != (self._layout.shapes[name], self._layout.dtype)
            or _crc32(values) != checksum
        ):
            # It is made anew at the next start.
            self._file = None
            self._cache.drop(self._name)
            return None
        return values

    def _open(self, path: Path | None) -> Any:
        if path is None:
            return None
        try:
            if path.stat().st_size == self._layout.num_bytes:
                return safe_open(path, framework="pt")
        except (OSError, SafetensorError):
            pass
        self._cache.drop(self._name)
        return None

    def _convert(self, source: CheckpointSource, facts: CheckpointFacts) -> Path | None:
        def write(file: BinaryIO) -> None:
            checksums = dict.fromkeys(self._layout.shapes, 0)
            file.write(self._layout.header(checksums))
            for name in self._layout.shapes:
                for values in self._chunks(source, facts, name):
                    checksums[name] = _crc32(values, checksums[name])
                    file.write(_bytes(values).data)
            file.seek(0)
            file.write(self._layout.header(checksums))

        return self._cache.write(self._name, self._layout.num_bytes, write)

    def _chunks(
        self, source: CheckpointSource, facts: CheckpointFacts, name: str
    ) -> Iterator[torch.Tensor]:
        fact = facts.tensors[name]
        num_rows, row_weights = fact.shape
        step = max(1, _CHUNK_WEIGHTS // row_weights)
        for start in range(0, num_rows, step):
            blocks = source.read(name, slice(start, start + step))
            values = dequantize(blocks, fact.format)
            check_finite(values, f"{facts.path}: tensor {name!r}")
            yield values.to(self._layout.dtype)


class _Layout:
    """The layout of the safetensors file; its size is known before it is written."""

    def __init__(self, facts: CheckpointFacts, dtype: str) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.shapes = {
            name: fact.shape
            for name, fact in facts.tensors.items()
            if fact.format != "plain" and len(fact.shape) == 2
        }
        self._dtype_name = _DTYPE_NAMES[dtype]
        header_bytes = len(self.header(dict.fromkeys(self.shapes, 0)))
        weights = sum(math.prod(shape) for shape in self.shapes.values())
        self.num_bytes = header_bytes + weights * self.dtype.itemsize

    def header(self, checksums: dict[str, int]) -> bytes:
        """The file's beginning. Its length does not depend on the checksums."""
        crc32 = json.dumps({name: f"{value:08x}" for name, value in checksums.items()})
        entries: dict[str, object] = {"__metadata__": {"crc32": crc32}}
        offset = 0
        for name, shape in self.shapes.items():
            end = offset + math.prod(shape) * self.dtype.itemsize
            entries[name] = {
                "dtype": self._dtype_name,
                "shape": shape,
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(entries).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def check_finite(values: torch.Tensor, thing: str) -> None:
    """Raises CheckpointError where a number is not finite: the blocks' scales are damaged."""
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(thing, "holds numbers that are not finite", fix="download it again")


def _bytes(values: torch.Tensor) -> NDArray[np.uint8]:
    return values.reshape(-1).view(torch.uint8).numpy()


def _crc32(values: torch.Tensor, before: int = 0) -> int:
    return zlib.crc32(_bytes(values).data, before)
