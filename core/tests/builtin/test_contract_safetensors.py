"""The built-in checkpoint source keeps its contract, in one file and in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pegboard.builtin.safetensors_describe import describe
from pegboard.builtin.safetensors_source import SafetensorsSource
from pegboard.testing.checkpoint_source import CheckpointSourceContract, SourceUnderTest


def _write_one_file(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def _write_shards(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    holder = {name: files[index % 2] for index, name in enumerate(names)}
    for file in files:
        save_file({n: tensors[n] for n in names if holder[n] == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": holder}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


class TestSafetensors(CheckpointSourceContract):
    @pytest.fixture
    def make(self) -> SourceUnderTest:
        return SourceUnderTest(describe, SafetensorsSource, _write_one_file)


class TestShardedSafetensors(CheckpointSourceContract):
    @pytest.fixture
    def make(self) -> SourceUnderTest:
        return SourceUnderTest(describe, SafetensorsSource, _write_shards)
