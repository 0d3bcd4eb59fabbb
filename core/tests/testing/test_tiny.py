"""Tiny models are checkpoints that transformers reads whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pegboard.testing.tiny import FAMILIES, write_tiny_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_every_tensor(tmp_path: Path, family: str, tied: bool) -> None:
    folder = write_tiny_model(tmp_path / family, family, tie_word_embeddings=tied)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    model, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"]
    logits = model(torch.arange(2, 40)[None]).logits[0]
    # Told apart, and not by one token alone.
    assert 0.5 < logits.std() < 20 and len(set(logits.argmax(-1).tolist())) > 10


def test_a_seed_gives_the_same_file(tmp_path: Path) -> None:
    files = [
        (write_tiny_model(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert files[0] == files[1] != files[2]


def test_the_tokenizer_knows_every_text_and_the_template_renders(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", tokenizer=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("the quick fox", "größer 日本 🙂", "  spaces\n\tand tabs"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(rendered, str) and rendered.startswith("<|im_start|>user\nhello<|im_end|>")


def test_overrides_reach_the_config(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", num_hidden_layers=3, dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["dtype"]) == (3, "bfloat16")
