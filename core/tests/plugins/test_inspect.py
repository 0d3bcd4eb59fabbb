"""The facts read of checkpoint and model before anything is resolved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pegboard import Engine, SamplingParams
from pegboard.errors import UserError
from pegboard.testing.tiny import FAMILIES, write_tiny_model


def _logprobs(model: Path) -> list[float]:
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3)
    found: list[float] = []
    with Engine({"model": str(model), "threads": 1, "kv_cache": {"memory": "16MiB"}}) as engine:
        engine.submit([5, 9, 200, 31], params)
        while engine.has_work():
            for delta in engine.step():
                found += [top for one in delta.logprobs or () for top in one.top_logprobs]
    return found


def test_a_config_without_architectures_is_told_what_to_name(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path)
    file = model / "config.json"
    config = json.loads(file.read_text())
    del config["architectures"]
    file.write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"none named; allowed: Llama.*; fix: name .* in config.json"
    ):
        Engine({"model": str(model)})


def test_biases_that_only_the_tensors_show_are_used(tmp_path: Path) -> None:
    """Qwen2 is Llama with biases: under Llama's name, nothing but the tensors says so."""
    qwen = write_tiny_model(tmp_path / "qwen", "qwen2")
    shutil.copytree(qwen, tmp_path / "llama")
    file = tmp_path / "llama" / "config.json"
    config = {**json.loads(file.read_text()), **FAMILIES["llama"], "attention_bias": False}
    file.write_text(json.dumps(config))
    with_biases = _logprobs(qwen)
    assert _logprobs(tmp_path / "llama") == with_biases
    tensors = load_file(qwen / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(".bias"):
            tensor.zero_()
    save_file(tensors, tmp_path / "llama" / "model.safetensors")
    assert _logprobs(tmp_path / "llama") != with_biases
