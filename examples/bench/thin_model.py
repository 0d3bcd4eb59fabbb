"""A model that is never computed: what measures the host alone starts its engine with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pegboard.models.shape import describe

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
"""SmolLM2-135M's, as vLLM's scheduler gets it."""

THIN = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
"""Pegboard's model instead: nothing is computed, and KV for a thousand sequences has to be planned."""


def write_thin_model(folder: Path) -> Path:
    """Writes the thin model's checkpoint into a new folder, which it returns."""
    config = CONFIG | THIN
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    parameters = describe(config).parameters
    weights = {parameter.name: np.zeros(parameter.shape, np.float32) for parameter in parameters}
    save_file(weights, folder / "model.safetensors")
    return folder
