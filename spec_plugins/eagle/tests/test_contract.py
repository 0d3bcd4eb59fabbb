"""The drafter keeps the contract, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pegboard.testing.model_drafter import ModelDrafterContract
from pegboard_eagle.drafter import EagleDrafter
from pegboard_eagle.options import EagleOptions


class EagleContract(ModelDrafterContract):
    manifest: ClassVar[Mapping[str, Any]] = {
        "describe": "pegboard_eagle.layout:describe",
        "options": "pegboard_eagle.options:EagleOptions",
        "promises": ["draft_model"],
    }
    layout: ClassVar[str] = "EAGLE-3"

    @pytest.fixture(scope="class")
    def make(self) -> type[EagleDrafter]:
        return EagleDrafter

    @pytest.fixture(scope="class")
    def target(self, target_folder: Path) -> Path:
        return target_folder

    @pytest.fixture(scope="class")
    def draft(
        self,
        heads: Mapping[str, Any],
        write: Callable[..., Path],
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Path:
        return write(tmp_path_factory.mktemp("head") / "h", heads[self.layout])


class TestFirst(EagleContract):
    layout = "EAGLE-1"


class TestThird(EagleContract):
    pass


class Trees(EagleOptions):
    """An object's options are its defaults."""

    top_k: int = 3
    depth: int = 3


class TestTrees(EagleContract):
    manifest: ClassVar[Mapping[str, Any]] = {
        **EagleContract.manifest,
        "options": f"{__name__}:Trees",
    }
    num_nodes = 6
