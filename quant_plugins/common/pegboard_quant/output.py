"""The checkpoint that `pegboard quantize` writes: a shard a decoder layer, and one for the rest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.dtypes import FLOAT_BYTES
from pegboard_quant.tokenizer_files import settings_of, tokenizer_of

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files of a checkpoint's folder that go along as they are."""

_UNPACKED = torch.float16
"""The type of weights that stay unquantized, of a checkpoint in block formats."""


class Output:
    """A folder that a checkpoint is written to.

    Args:
        folder: of it.
        facts: of the checkpoint that is quantized.
        num_shards: of the new one.
    """

    def __init__(self, folder: Path, facts: CheckpointFacts, num_shards: int) -> None:
        self._folder = folder
        self._facts = facts
        self._num_shards = num_shards

    def write_shard(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes the shard of an index, complete or not at all."""
        ordered = {name: tensors[name].contiguous() for name in sorted(tensors)}
        write_tensors(self._folder / self._shard(index), ordered)

    def kept(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Float32 values of a parameter that is not quantized, in the type it is stored in.

        Raises:
            CheckpointError: they are too large for it.
        """
        fact = self._facts.tensors.get(name)
        plain = fact is not None and fact.format == "plain" and fact.dtype in FLOAT_BYTES
        dtype = getattr(torch, fact.dtype) if plain and fact is not None else _UNPACKED
        stored = values.to(dtype)
        if not bool(stored.isfinite().all()):
            raise CheckpointError(f"tensor {name}", f"holds numbers that {dtype} cannot hold")
        return stored

    def finish(self, quantization: Mapping[str, Any]) -> None:
        """Writes index, tokenizer and, last, the config: what lacks it is no checkpoint."""
        self._write_index()
        self._write_tokenizer()
        config = {
            key: value
            for key, value in self._facts.config.items()
            if key not in ("quantization_config", "compression_config")
        }
        if "dtype" not in config and "torch_dtype" not in config:
            config["dtype"] = str(_UNPACKED).removeprefix("torch.")
        write_json(self._folder / CONFIG, {**config, "quantization_config": dict(quantization)})

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards so far."""
        files = map(self._shard, range(self._num_shards))
        return sum((self._folder / file).stat().st_size for file in files)

    def _shard(self, index: int) -> str:
        return f"model-{index + 1:05d}-of-{self._num_shards:05d}.safetensors"

    def _write_index(self) -> None:
        from safetensors import safe_open

        weight_map: dict[str, str] = {}
        total = 0
        for file in map(self._shard, range(self._num_shards)):
            with safe_open(self._folder / file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a mapping
                    weight_map[name] = file
                    total += shard.get_tensor(name).nbytes
        weight_map = dict(sorted(weight_map.items()))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(self._folder / INDEX, index)

    def _write_tokenizer(self) -> None:
        source, tokenizer = Path(self._facts.path), self._facts.tokenizer
        folder = source if source.is_dir() else source.parent
        is_beside = tokenizer.file is not None and Path(tokenizer.file).parent == folder
        if source.is_dir() or is_beside:
            for name in COPIED:
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, self._folder / name)
            return
        if tokenizer.file is not None:
            write_json(self._folder / "tokenizer.json", tokenizer_of(tokenizer))
            write_json(self._folder / "tokenizer_config.json", settings_of(tokenizer))
        generation = dict(self._facts.generation)
        if self._facts.eos_token_ids:
            generation["eos_token_id"] = list(self._facts.eos_token_ids)
        if generation:
            write_json(self._folder / "generation_config.json", generation)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a safetensors file, complete or not at all; whoever may read other new files may read it,
    while the library's are its user's alone."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.touch()
    mode = temporary.stat().st_mode
    save_file(dict(tensors), temporary, metadata={"format": "pt"})
    temporary.chmod(mode)
    os.replace(temporary, path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file, complete or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
