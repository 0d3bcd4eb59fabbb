"""The drafter keeps the contracts of its interface."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pegboard.testing.model_drafter import ModelDrafterContract
from pegboard.testing.sampled_drafter import SampledDrafterContract
from pegboard.testing.tiny import write_tiny_model
from pegboard_draft_model.drafter import DraftModel
from pegboard_draft_model.options import DraftModelOptions


class DraftModelContract(ModelDrafterContract):
    manifest: ClassVar[Mapping[str, Any]] = {
        "describe": "pegboard_draft_model.plan:describe",
        "options": "pegboard_draft_model.options:DraftModelOptions",
        "promises": ["draft_model", "probabilities"],
    }

    @pytest.fixture(scope="class")
    def make(self) -> type[DraftModel]:
        return DraftModel

    @pytest.fixture(scope="class")
    def draft(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("draft") / "m"
        return write_tiny_model(folder, dtype="float64", seed=3, num_hidden_layers=1)


class Certain(DraftModelOptions):
    """An object's options are its defaults."""

    min_confidence: float = 0.0


class TestDrawn(DraftModelContract):
    manifest: ClassVar[Mapping[str, Any]] = {
        **DraftModelContract.manifest,
        "options": f"{__name__}:Certain",
    }


@pytest.mark.slow
class TestConfident(DraftModelContract):
    """Tiny models are sure of little, so that most guesses end early."""


@pytest.mark.slow
class TestWindowed(TestDrawn):
    """Of a draft model with a window, what is needed is in it."""

    @pytest.fixture(scope="class")
    def draft(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("draft") / "m"
        return write_tiny_model(
            folder, "mistral", dtype="float64", seed=3, num_hidden_layers=1, sliding_window=9
        )


class TestDraws(SampledDrafterContract):
    manifest: ClassVar[Mapping[str, Any]] = DraftModelContract.manifest

    @pytest.fixture(scope="class")
    def make(self) -> type[DraftModel]:
        return DraftModel

    @pytest.fixture(scope="class")
    def draft(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("draft") / "m"
        return write_tiny_model(folder, dtype="float64", seed=3, num_hidden_layers=1)
