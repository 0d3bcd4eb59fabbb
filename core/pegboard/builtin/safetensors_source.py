"""Reads tensors of a safetensors checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from pegboard.builtin.safetensors_describe import describe, open_shard, shard_files
from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts, CheckpointSource


class SafetensorsSource(CheckpointSource):
    """An open checkpoint, one map a file.

    Raises:
        CheckpointError: its files are not those of the facts any more.
    """

    def __init__(self, facts: CheckpointFacts) -> None:
        path = Path(facts.path)
        if describe(path).fingerprint != facts.fingerprint:
            raise CheckpointError(facts.path, "changed since it was planned", fix="start again")
        self._path = facts.path
        self._open = ExitStack()
        self._handles: dict[str, Any] = {}
        for file in shard_files(path):
            handle = self._open.enter_context(open_shard(file, "pt"))
            self._handles |= dict.fromkeys(handle.keys(), handle)

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        if name not in self._handles:
            raise CheckpointError(f"tensor {name}", f"missing in {self._path}")
        handle = self._handles[name]
        try:
            tensor = handle.get_tensor(name) if rows is None else handle.get_slice(name)[rows]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"tensor {name}", f"damaged in {self._path} ({error})") from error
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def close(self) -> None:
        self._handles.clear()
        self._open.close()
