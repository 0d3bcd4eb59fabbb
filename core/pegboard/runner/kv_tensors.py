"""Allocates the KV tensors that an attention backend's layout declares."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pegboard.interfaces.kv import KVGroup, TensorSpec

LayerKV = Mapping[str, torch.Tensor]


def allocate(
    groups: Sequence[KVGroup],
    num_blocks: Sequence[int],
    layouts: Sequence[Sequence[TensorSpec]],
    device: torch.device,
) -> list[LayerKV]:
    """Zeroed tensors [num_blocks, *spec.shape], by name, for each decoder layer in order."""
    layers: dict[int, LayerKV] = {}
    for group, blocks, layout in zip(groups, num_blocks, layouts, strict=True):
        for layer in group.layers:
            layers[layer] = {
                spec.name: _zeros((blocks, *spec.shape), getattr(torch, spec.dtype), device)
                for spec in layout
            }
    return [layers[layer] for layer in sorted(layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU, memory that the system zeroes when a page is first used: `torch.zeros` would touch
    all of it, which takes longer than loading the weights."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


def block_checksums(
    kv: Sequence[LayerKV], layers: Sequence[int], blocks: Sequence[int]
) -> list[int]:
    """For each block, the CRC-32 of its bytes in the tensors of the layers, scales included."""
    tensors = [tensor for layer in layers for tensor in kv[layer].values()]
    return [_checksum(tensors, block) for block in blocks]


def _checksum(tensors: Sequence[torch.Tensor], block: int) -> int:
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor[block].reshape(-1).view(torch.uint8).cpu().numpy().data, value)
    return value
