"""Whole checkpoints through an engine, against straight forwards and against other tools' logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from pegboard.interfaces.quantizer import QuantizerContext
from pegboard.testing.quantized_checkpoint import (
    REFERENCE,
    RoundingDecoder,
    dequantized,
    facts_of,
    logprob_errors,
    tensors_of,
    tools_logits,
)
from pegboard_fp8.e4m3 import to_e4m3
from pegboard_fp8.quantizer import FP8Quantizer
from pegboard_quant.options import CheckpointOptions

RoundInputs = Callable[[str, torch.Tensor], torch.Tensor]

OWN = {"fp8-block-inv", "fp8-tensor-static"}
FOREIGN = {"ct-fp8-block": 128, "ct-fp8-dynamic": None, "ct-fp8-static-kv": None}
TOOLS_ROUNDING = 0.09  # what rounded inputs change, by the fixtures' READMEs, and its noise
SAME = 1e-4
TEXTS = torch.randint(512, (9, 4), generator=torch.Generator().manual_seed(4)).tolist()


def config_of(folder: Path, **options: str) -> dict[str, Any]:
    return {
        **REFERENCE,
        "model": str(folder),
        "quantizer": {"name": "fp8", "options": options} if options else "auto",
    }


@pytest.mark.parametrize("name", sorted(OWN))
def test_checkpoints_written_by_formulas_give_their_logits(quant_data: Path, name: str) -> None:
    ids, logits = tools_logits(quant_data / name)
    assert logprob_errors(config_of(quant_data / name), [ids], [logits])[0] < SAME


@pytest.mark.parametrize("name", FOREIGN)
def test_other_tools_checkpoints_give_their_logits_within_the_rounding_of_inputs(
    quant_data: Path, name: str
) -> None:
    ids, logits = tools_logits(quant_data / name)
    assert logprob_errors(config_of(quant_data / name), [ids], [logits])[0] < TOOLS_ROUNDING


@pytest.mark.parametrize("activations", ["checkpoint", "float"])
@pytest.mark.parametrize("name", [*FOREIGN, "ct-fp8-block-ragged"])
def test_an_engine_computes_what_a_straight_decoder_does(
    quant_data: Path, name: str, activations: str
) -> None:
    folder = quant_data / name
    facts = facts_of(folder)
    quantizer = FP8Quantizer(QuantizerContext(facts, "float32"), CheckpointOptions())
    round_inputs: RoundInputs = rounding_of(folder)
    if activations == "float":
        round_inputs = unrounded
    decoder = RoundingDecoder(facts.config, dequantized(quantizer, facts), round_inputs)
    logits = [decoder.forward(ids)[0] for ids in TEXTS]
    errors = logprob_errors(config_of(folder, activations=activations), TEXTS, logits)
    # An input at the middle of two codes, which the last bit moves to the other, changes a text.
    assert median(errors) < SAME and max(errors) < 3 * TOOLS_ROUNDING


def rounding_of(folder: Path) -> RoundInputs:
    tensors = tensors_of(folder)
    if "static" in folder.name:
        return partial(static, tensors)
    return partial(dynamic, 128 if "block" in folder.name else None)


def unrounded(name: str, x: torch.Tensor) -> torch.Tensor:
    return x


def static(tensors: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    scale = tensors[f"{name}.input_scale"].float()
    return (to_e4m3(x.float() / scale).float() * scale).double()


def dynamic(group: int | None, name: str, x: torch.Tensor) -> torch.Tensor:
    """Each token's runs of inputs, the last one perhaps shorter, by a scale of their own."""
    runs = torch.split(x.float(), group or x.shape[1], dim=1)
    scales = [run.abs().amax(1, keepdim=True) / 448 for run in runs]
    rounded = [
        to_e4m3(run / scale).float() * scale for run, scale in zip(runs, scales, strict=True)
    ]
    return torch.cat(rounded, 1).double()
