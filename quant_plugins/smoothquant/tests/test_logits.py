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
from pegboard_quant.options import CheckpointOptions
from pegboard_smoothquant.quantizer import SmoothQuantizer

RoundInputs = Callable[[str, torch.Tensor], torch.Tensor]

DYNAMIC, STATIC = "ct-w8a8-int8-dynamic", "ct-w8a8-int8-static"
TOOLS_ROUNDING = {DYNAMIC: 0.025, STATIC: 0.035}  # what rounded inputs change, as the READMEs say
SAME = 1e-4
TEXTS = torch.randint(512, (9, 4), generator=torch.Generator().manual_seed(4)).tolist()


def config_of(folder: Path, **options: str) -> dict[str, Any]:
    return {
        **REFERENCE,
        "model": str(folder),
        "quantizer": {"name": "smoothquant", "options": options} if options else "auto",
    }


@pytest.mark.parametrize("name", [DYNAMIC, STATIC])
def test_other_tools_checkpoints_give_their_logits_within_the_rounding_of_inputs(
    quant_data: Path, name: str
) -> None:
    ids, logits = tools_logits(quant_data / name)
    (error,) = logprob_errors(config_of(quant_data / name), [ids], [logits])
    assert error < TOOLS_ROUNDING[name]


@pytest.mark.parametrize("activations", ["checkpoint", "float"])
@pytest.mark.parametrize("name", [DYNAMIC, STATIC])
def test_an_engine_computes_what_a_straight_decoder_does(
    quant_data: Path, name: str, activations: str
) -> None:
    folder = quant_data / name
    facts = facts_of(folder)
    quantizer = SmoothQuantizer(QuantizerContext(facts, "float32"), CheckpointOptions())
    round_inputs: RoundInputs = dynamic
    if activations == "float":
        round_inputs = unrounded
    elif name == STATIC:
        round_inputs = partial(static, tensors_of(folder))
    decoder = RoundingDecoder(facts.config, dequantized(quantizer, facts), round_inputs)
    logits = [decoder.forward(ids)[0] for ids in TEXTS]
    errors = logprob_errors(config_of(folder, activations=activations), TEXTS, logits)
    # An input at the middle of two codes, which the last bit moves to the other, changes a text.
    assert median(errors) < SAME and max(errors) < 2 * TOOLS_ROUNDING[name]


def unrounded(name: str, x: torch.Tensor) -> torch.Tensor:
    return x


def static(tensors: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    scale = tensors[f"{name}.input_scale"].float()
    return ((x.float() / scale).round().clamp(-128, 127) * scale).double()


def dynamic(name: str, x: torch.Tensor) -> torch.Tensor:
    scale = x.float().abs().amax(1, keepdim=True) / 127
    return ((x.float() / scale).round() * scale).double()
