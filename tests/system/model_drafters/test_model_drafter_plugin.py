"""Drafters with a model of their own as plugins, and what is planned for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from pegboard import Config
from pegboard.cli.check import report
from pegboard.compose import prepare
from pegboard.interfaces import drafter
from pegboard.interfaces.kernel import LinearKernel, PackedWeight
from pegboard.interfaces.observer import Event, Observer, StepDone
from pegboard.interfaces.quantizer import LinearWeight
from pegboard.testing.invariance import Case, Traces, differences, run_case
from pegboard.testing.model_drafter import PARAMS, PROMPTS
from pegboard.testing.model_drafters import SecondModel
from pegboard.testing.tiny import write_tiny_model

PLUGIN = f"""# /// pegboard
# plugin = {{name = "second_model"}}
# [[provides]]
# interface = "drafter"
# version = {drafter.VERSION}
# name = "second_model"
# summary = "A second model of the registry"
# promises = ["draft_model"]
# describe = "pegboard.testing.model_drafters:describe_second_model"
# ///
from pegboard import hookimpl


@hookimpl
def pegboard_drafters():
    from pegboard.testing.model_drafters import SecondModel

    return {{"second_model": SecondModel}}
"""


@pytest.mark.parametrize("executor", ["local", "processes"])
def test_a_plugin_brings_its_model_to_whichever_worker(
    config: dict[str, Any], second: Path, expected: Traces, tmp_path: Path, executor: str
) -> None:
    file = tmp_path / "second_model.py"
    file.write_text(PLUGIN)
    config = config | {
        "plugins": {"load": [str(file)]},
        "drafter": {
            "name": "second_model",
            "model": str(second),
            "num_speculative_tokens": 5,
        },
        "executor": executor,
    }
    tried = Tried()
    got = run_case(config, Case(batch=4), PROMPTS, PARAMS, observer=[tried])
    assert differences(expected, got, 1e-5) == []
    assert tried.count > 0
    wanted = Config.from_values(config)
    prepared = prepare(wanted)
    found = report(wanted, prepared.composition, prepared.ledger)
    assert any(note.startswith(f"drafter: its model is {second}") for note in found["notes"])


class Tried(Observer):
    """Counts drafts."""

    def __init__(self) -> None:
        self.count = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.count += event.num_tried

    def close(self) -> None:
        pass


class OnlyPacked(LinearKernel):
    """Runs what a quantized target has, and nothing of a float drafter."""

    manifest: ClassVar[dict[str, Any]] = {
        "operations": [{"operation": "linear", "formats": ["uint4"]}]
    }

    def self_test(self) -> None:
        raise AssertionError

    def prepare(self, weight: LinearWeight) -> PackedWeight:
        raise AssertionError

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        raise AssertionError

    def gather_rows(self, weight: PackedWeight, row_ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError


def test_a_kernel_that_one_of_the_models_uses_is_used(tmp_path: Path) -> None:
    quantized = Path(__file__).parents[2] / "data" / "quant" / "gptq-4b-g32-sym"
    vocab_size = json.loads((quantized / "config.json").read_text())["vocab_size"]
    draft = write_tiny_model(tmp_path / "draft", vocab_size=vocab_size)
    config = Config.from_values(
        {"model": str(quantized), "max_model_len": 64, "drafter": {"model": str(draft)}}
    )
    found = prepare(config, drafter=SecondModel, kernel=OnlyPacked())
    target, second = (
        {kernel.part.name for kernel in plan.kernels} for plan in found.composition.models
    )
    assert "OnlyPacked" in target - second
