"""A plain checkpoint, rounded while it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import Engine
from pegboard.testing.dense_decoder import DenseDecoder
from pegboard.testing.quantized_checkpoint import (
    facts_of,
    largest_logprob_error,
    refusal,
    tensors_of,
)
from pegboard.testing.tiny import write_tiny_model
from pegboard_quant.rounding import round_to_nearest

PROMPT = [5, 9, 200, 31, 7, 7, 104, 16]
SMALL: dict[str, Any] = {"kv_cache": {"memory": "16MiB"}, "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 40 and 72 inputs: no group size divides them.
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def _rounded(model: Path, bits: int, size: int, zeros: Any, everything: bool) -> Any:
    """float64 weights, all linear layers rounded by the formula."""
    tensors = {name: tensor.double() for name, tensor in tensors_of(model).items()}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and (everything or "_proj" in name):
            codes = round_to_nearest(tensor, bits, size, zeros)
            group = torch.arange(tensor.shape[1]) // codes.group_size
            centred = codes.values.double() - codes.zeros.double()[:, group]
            tensors[name] = centred * codes.scales.double()[:, group]
    return tensors


@pytest.mark.parametrize(
    ("name", "options", "form"),
    [
        ("w4", {}, (4, 64, "fitted", False)),
        ("w4", {"group_size": 32, "embedding": True}, (4, 32, "fitted", True)),
        ("int8", {"group_size": -1}, (8, -1, "middle", False)),
    ],
)
def test_an_engine_runs_the_rounded_weights(
    model: Path, name: str, options: dict[str, Any], form: tuple[Any, ...]
) -> None:
    expected = DenseDecoder(facts_of(model).config, _rounded(model, *form))
    logits, _ = expected.forward(PROMPT)
    config = {**SMALL, "model": str(model), "quantizer": {"name": name, "options": options}}
    assert largest_logprob_error(config, PROMPT, logits) < 1e-3


def test_int8_activations_change_little_and_not_nothing(model: Path) -> None:
    expected = DenseDecoder(facts_of(model).config, _rounded(model, 8, 64, "middle", False))
    logits, _ = expected.forward(PROMPT)
    options = {"activations": "int8"}
    config = {**SMALL, "model": str(model), "quantizer": {"name": "int8", "options": options}}
    assert 1e-5 < largest_logprob_error(config, PROMPT, logits) < 0.1


def test_nothing_is_rounded_unless_it_is_named(model: Path) -> None:
    with Engine({**SMALL, "model": str(model)}) as engine:
        assert engine.prepared.composition.target.parts["quantizer"].name == "none"


def test_what_is_quantized_already_is_refused(root: Path) -> None:
    model = root / "tests" / "data" / "quant" / "gptq-4b-g32-sym"
    line = refusal({**SMALL, "model": str(model), "quantizer": "w4"})
    assert line is not None and "reads none, and the checkpoint is quantized by gptq" in line


def test_groups_that_quantized_inputs_would_cut_are_refused(model: Path) -> None:
    quantizer = {"name": "w4", "options": {"group_size": 48}}
    line = refusal({**SMALL, "model": str(model), "quantizer": quantizer})
    assert line is not None and "quantizer.options.group_size" in line


def test_weights_that_are_not_finite_are_refused(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = tensors_of(model)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    line = refusal({**SMALL, "model": str(tmp_path), "quantizer": "w4"})
    assert line is not None and "layers.1.mlp.up_proj.weight: holds numbers that are not" in line
