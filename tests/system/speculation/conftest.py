"""Small models for drafters, which these tests share."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pegboard.testing.tiny import write_tiny_model

HIDDEN, INNER, VOCAB, DRAFT_VOCAB = 40, 48, 517, 203
"""Hidden size and vocabulary are those of the tiny targets."""
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 24
TAPS = (0, 1, 2)
"""The target's layers whose inputs a head of EAGLE-3 reads; 2: behind the last one's norm."""

WriteHead = Callable[..., Path]


def write_eagle_head(folder: Path, *, third: bool) -> Path:
    """Writes a head of EAGLE-1, or of EAGLE-3 with a vocabulary of its own, for a tiny target."""
    chance = torch.Generator().manual_seed(5)

    def weight(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=chance, dtype=torch.float64)
        return values / math.sqrt(shape[-1])

    layer, inputs = ("midlayer", 2 * HIDDEN) if third else ("layers.0", HIDDEN)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "fc.weight": weight(HIDDEN, (len(TAPS) if third else 2) * HIDDEN),
        f"{layer}.self_attn.q_proj.weight": weight(q, inputs),
        f"{layer}.self_attn.k_proj.weight": weight(kv, inputs),
        f"{layer}.self_attn.v_proj.weight": weight(kv, inputs),
        f"{layer}.self_attn.o_proj.weight": weight(HIDDEN, q),
        f"{layer}.mlp.gate_proj.weight": weight(INNER, HIDDEN),
        f"{layer}.mlp.up_proj.weight": weight(INNER, HIDDEN),
        f"{layer}.mlp.down_proj.weight": weight(HIDDEN, INNER),
    }
    norms = [f"{layer}.post_attention_layernorm"]
    config: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "bias": False,
    }
    if third:
        norms += ["norm", f"{layer}.hidden_norm", f"{layer}.input_layernorm"]
        ids = torch.randperm(VOCAB, generator=chance)[:DRAFT_VOCAB].sort().values
        tensors["lm_head.weight"] = weight(DRAFT_VOCAB, HIDDEN)
        tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
        config["draft_vocab_size"] = DRAFT_VOCAB
    tensors |= {f"{name}.weight": 1 + weight(HIDDEN) for name in norms}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def model_drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Settings of `drafter` for the tiny targets: another model; a head of EAGLE-1 in chains, one of
    EAGLE-3 in trees."""
    folder = tmp_path_factory.mktemp("drafters")
    first = write_eagle_head(folder / "first", third=False)
    third = write_eagle_head(folder / "third", third=True)
    sizes: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    small = write_tiny_model(folder / "small", dtype="float64", seed=3, tokenizer=True, **sizes)
    return {
        "draft model": {
            "name": "draft_model",
            "model": str(small),
            "options": {"min_confidence": 0},
        },
        "eagle chain": {"name": "eagle", "model": str(first)},
        "eagle tree": {
            "name": "eagle",
            "model": str(third),
            "options": {"top_k": 2, "depth": 3, "taps": list(TAPS)},
        },
    }
