"""The two drafters of the suites that have a model of their own keep their contract."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pegboard.testing.model_drafter import ModelDrafterContract
from pegboard.testing.model_drafters import Branching, OneLayer, SecondModel, write_one_layer
from pegboard.testing.tiny import write_tiny_model
from pegboard.testing.watched_drafter import MakeModelDrafter

TORCH: dict[str, Any] = {"kernels": "torch", "attention": "torch"}


class TestSecondModel(ModelDrafterContract):
    manifest: ClassVar[Mapping[str, Any]] = SecondModel.manifest
    settings: ClassVar[Mapping[str, Any]] = TORCH

    @pytest.fixture(scope="class")
    def make(self) -> MakeModelDrafter:
        return SecondModel

    @pytest.fixture(scope="class")
    def draft(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("second") / "m"
        return write_tiny_model(folder, dtype="float64", seed=3, num_hidden_layers=3)


class TestOneLayer(ModelDrafterContract):
    manifest: ClassVar[Mapping[str, Any]] = OneLayer.manifest
    settings: ClassVar[Mapping[str, Any]] = TORCH
    reads_next_token: ClassVar[bool] = True

    @pytest.fixture(scope="class")
    def make(self) -> MakeModelDrafter:
        return OneLayer

    @pytest.fixture(scope="class")
    def draft(self, tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
        return write_one_layer(tmp_path_factory.mktemp("layer") / "m", target)


class TestBranching(TestOneLayer):
    @pytest.fixture(scope="class")
    def make(self) -> MakeModelDrafter:
        return Branching
