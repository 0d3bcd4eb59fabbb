"""Writes a head as SafeAILab and SpecForge do: `config.json` and `model.safetensors`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pegboard.interfaces.model import ModelShape
from pegboard_eagle.training.head import Head


def export(
    head: Head, token_ids: torch.Tensor, target: ModelShape, taps: tuple[int, ...], folder: Path
) -> None:
    """Writes the head's files, each whole or not at all.

    Args:
        token_ids: int64 [draft vocabulary], ascending ids of the target.
        taps: layers of the target whose inputs the head reads, in the order of `fc`.
    """
    tensors = {name: one.detach() for name, one in head.state_dict().items()}
    tensors["fc.weight"] = tensors["fc.weight"] * tensors.pop("tap_scale")
    tensors["d2t"] = token_ids - torch.arange(len(token_ids))
    tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(
        0, token_ids, value=True
    )
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "model.safetensors.part"
    save_file(
        {name: one.contiguous() for name, one in tensors.items()},
        written,
        metadata={"format": "pt"},
    )
    text = json.dumps(_config(head, target, taps), indent=2) + "\n"
    (folder / "config.json.part").write_text(text, encoding="utf-8")
    (folder / "config.json.part").replace(folder / "config.json")
    written.replace(folder / "model.safetensors")


def _config(head: Head, target: ModelShape, taps: tuple[int, ...]) -> dict[str, Any]:
    """Every key stated: what readers assume without one differs."""
    shape = head.shape
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "max_position_embeddings": target.max_position,
        "rope_theta": shape.theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": shape.vocab_size,
        "target_hidden_size": target.hidden_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": True,
        "eagle_config": {
            "use_aux_hidden_state": True,
            # Outputs of layers, as the trainers count: one less than the input.
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
        },
        "torch_dtype": "float32",
    }
