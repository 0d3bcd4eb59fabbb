"""An open GGUF file: tensors by Hugging Face's names, in Hugging Face's row order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts, CheckpointSource
from pegboard.regular_files import open_regular
from pegboard_gguf.header import StoredTensor, read_header
from pegboard_gguf.translate import PLAIN_DTYPES, tensor_name


class GGUFSource(CheckpointSource):
    """Maps a file, a tensor at a time, so that no more of it is in memory than is in use. Block formats
    come as their bytes, uint8 [rows, bytes].

    Files of the architecture `llama` hold q and k with the two halves of each head interleaved, as
    their rotary embedding pairs neighbours; rows of all formats are put back.

    Raises:
        CheckpointError: the file is not the one that was described.
    """

    def __init__(self, facts: CheckpointFacts) -> None:
        self._path = Path(facts.path)
        tensors = read_header(self._path).tensors.values()
        self._tensors = {tensor_name(tensor.name): tensor for tensor in tensors}
        if not facts.tensors.keys() <= self._tensors.keys():
            raise CheckpointError(facts.path, "has changed since it was described")
        self._interleaved_heads = _interleaved_heads(facts)
        self._file = open_regular(self._path)

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self._path}: tensor {name!r}", "is missing")
        stored = self._stored(tensor)
        num_heads = self._num_interleaved_heads(name)
        if num_heads:
            order = _halves_first(stored.shape[0], num_heads)
            return stored[order if rows is None else order[rows]]
        return stored if rows is None else stored[rows]

    def close(self) -> None:
        # A tensor's map goes with the last tensor that views it.
        self._file.close()

    def _stored(self, tensor: StoredTensor) -> torch.Tensor:
        content = torch.from_numpy(self._mapped(tensor))
        dtype = PLAIN_DTYPES.get(tensor.type)
        if dtype is not None:
            return content.view(getattr(torch, dtype)).view(tensor.shape)
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type]]
        return content.view(*tensor.shape[:-1], tensor.shape[-1] // block_size * block_bytes)

    def _mapped(self, tensor: StoredTensor) -> np.memmap[tuple[int], np.dtype[np.uint8]]:
        if self._file.closed:
            raise CheckpointError(f"{self._path}", "is closed")
        try:
            # Copy on write, because torch wants writable memory; the file itself is never written.
            return np.memmap(
                self._file, np.uint8, mode="c", offset=tensor.offset, shape=(tensor.num_bytes,)
            )
        except ValueError:  # longer than the file is now
            raise CheckpointError(f"{self._path}", "has changed since it was described") from None

    def _num_interleaved_heads(self, name: str) -> int:
        for projection, num_heads in self._interleaved_heads.items():
            if f".{projection}." in name:
                return num_heads
        return 0


def _interleaved_heads(facts: CheckpointFacts) -> dict[str, int]:
    """Projections whose rows are interleaved, to their numbers of heads."""
    if facts.config["model_type"] not in ("llama", "mistral"):
        return {}
    return {
        "q_proj": facts.config["num_attention_heads"],
        "k_proj": facts.config["num_key_value_heads"],
    }


def _halves_first(num_rows: int, num_heads: int) -> torch.Tensor:
    """int64 [num_rows]: for each row as Hugging Face orders them, where it is stored."""
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)
