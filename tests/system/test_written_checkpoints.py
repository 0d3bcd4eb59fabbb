"""The checkpoints that `pegboard quantize` writes, as compressed-tensors and transformers read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pegboard.cli.command_context import EngineCommandContext
from pegboard.testing.quantized_checkpoint import logprob_errors
from pegboard.testing.tiny import write_tiny_model
from pegboard_quant.quantize import Job, quantize
from pegboard_quant.recipe import read_recipe

IDS = list(range(5, 45))
ROUNDING = 0.03  # inputs at the middle of two codes go one way or the other
RECIPE = """
method: smoothquant
settings: {alpha: 0.8}
rules:
- {match: "*.mlp.down_proj", keep: true}
- {match: "*.self_attn.*", settings: {activations: dynamic}}
- {match: "*.0.mlp.*", kind: linear, settings: {activations: auto, static_error: 100}}
- {match: "*.mlp.*", kind: linear, settings: {activations: auto, static_error: 0}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 32,
        "num_hidden_layers": 2,
    }
    write_tiny_model(folder, tokenizer=True, dtype="bfloat16", num_attention_heads=2, **sizes)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 30)
    return folder


def written(model: Path, out: Path, recipe: str) -> Path:
    """The checkpoint that a recipe makes of the model."""
    file = out.with_suffix(".yaml")
    file.write_text(recipe)
    read = read_recipe(file)
    assert read.method is not None
    quantize(
        Job(str(model), read.method, out, read, data=model / "text.txt", num_texts=4),
        EngineCommandContext(),
    )
    return out


def test_a_recipe_says_how_each_layers_inputs_are_taken(model: Path, tmp_path: Path) -> None:
    out = written(model, tmp_path / "out", RECIPE)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    found = {
        target.removeprefix("model.layers."): group["input_activations"]["dynamic"]
        for group in config["config_groups"].values()
        for target in group["targets"]
    }
    attention = {f"{i}.self_attn.{part}_proj": True for i in (0, 1) for part in "qkvo"}
    mlp = {f"{i}.mlp.{part}_proj": i == 1 for i in (0, 1) for part in ("gate", "up")}
    assert found == attention | mlp
    assert {"lm_head", "model.layers.0.mlp.down_proj"} < set(config["ignore"])


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        "method: fp8",
        "{method: fp8, settings: {weights: tensor, activations: static}}",
        "{method: fp8, rules: [{match: '*mlp*', settings: {activations: none}}]}",
    ],
    ids=["smoothquant by layer", "fp8", "fp8 static", "fp8 by layer"],
)
def test_transformers_computes_what_an_engine_does(
    model: Path, tmp_path: Path, recipe: str
) -> None:
    out = written(model, tmp_path / "out", recipe)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        logits = theirs(torch.tensor([IDS])).logits[0]
    config = {"model": str(out), "dtype": "float32", "kernels": "torch", "attention": "torch"}
    (error,) = logprob_errors(config, [IDS], [logits])
    assert error < ROUNDING
