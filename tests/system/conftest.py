"""Models that the system tests share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pegboard.testing.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family to a tiny float64 checkpoint."""
    folder = tmp_path_factory.mktemp("tiny")
    families = ("llama", "mistral", "qwen2", "qwen3")
    return {
        family: write_tiny_model(folder / family, family, dtype="float64") for family in families
    }


@pytest.fixture(scope="session")
def texts(shared_folder: Path) -> list[str]:
    """Prompts that people wrote, of many kinds, at most a few hundred characters each."""
    file = shared_folder / "fixtures" / "text" / "spec_bench.jsonl"
    if not file.is_file():
        pytest.skip("the shared material holds no fixtures/text/spec_bench.jsonl")
    prompts = [json.loads(line)["turns"][0] for line in file.read_text().splitlines()]
    return [prompt[:300] for prompt in prompts[::8]]
