"""Targets, drafters' models and runs that these tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pegboard import SamplingParams
from pegboard.interfaces.drafter import DrafterContext
from pegboard.testing.invariance import Case, Traces, run_case
from pegboard.testing.model_drafter import PARAMS, PROMPTS
from pegboard.testing.model_drafters import write_one_layer
from pegboard.testing.tiny import write_tiny_model

NUM_NODES = 5


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target") / "m", dtype="float64")


@pytest.fixture(scope="session")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of other sizes, in whose heads the target's kernels do not fit by chance."""
    folder = tmp_path_factory.mktemp("second") / "m"
    sizes: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_tiny_model(folder, dtype="float64", seed=3, num_hidden_layers=3, **sizes)


@pytest.fixture(scope="session")
def layer(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return write_one_layer(tmp_path_factory.mktemp("layer") / "m", target)


@pytest.fixture(scope="session")
def config(target: Path) -> dict[str, Any]:
    return {
        "model": str(target),
        "dtype": "float64",
        "kernels": "torch",
        "attention": "torch",
        "max_model_len": 64,
        "prefix_cache": "none",
        "kv_cache": {"block_size": 4},
    }


@pytest.fixture(scope="session")
def expected(config: dict[str, Any]) -> Traces:
    return run_case(config, Case(batch=4), PROMPTS, PARAMS)


@pytest.fixture(scope="session")
def run_drafter(config: dict[str, Any]) -> Callable[..., tuple[Traces, Any]]:
    """(class of a drafter, its model, case, ...) -> the outcome, and the drafter, to be looked into."""

    def run(
        kind: type[Any],
        model: Path,
        case: Case,
        params: Sequence[SamplingParams] = PARAMS,
        depth: int = 1,
        **objects: Any,
    ) -> tuple[Traces, Any]:
        made: list[Any] = []

        def make(context: DrafterContext) -> Any:
            made.append(kind(context))
            return made[-1]

        make.manifest = kind.manifest  # type: ignore[attr-defined]
        drafting = {
            "drafter": {"model": str(model), "num_speculative_tokens": NUM_NODES},
            "executor": {"depth": depth},
        }
        # An object takes the place of what the config says.
        base = {key: value for key, value in config.items() if key not in objects}
        got = run_case({**base, **drafting}, case, PROMPTS, params, drafter=make, **objects)
        return got, made[0]

    return run
