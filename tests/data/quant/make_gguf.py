"""Writes the GGUF files of `gguf-q8_0`, `gguf-q4_0` and `gguf-q4_k-mixed-tied`, by their READMEs.

    python make_gguf.py

The folders came with what their tools made of the files, and without the files. The model of every
folder here is drawn from one seed: drawn anew, and quantized by the same tools, it gives the dequantized
weights that the folders hold, bit for bit, or this stops. Needs gguf and, for K-quants, gptqmodel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.numpy import load_file

SEED, STD, OUTLIERS = 1234, 0.08, 17
FOLDER = Path(__file__).parent
Weights = dict[str, NDArray[np.float32]]

MIXED = {
    **dict.fromkeys(("attn_q", "attn_k", "ffn_gate", "ffn_up"), Kind.Q4_K),
    **dict.fromkeys(("attn_v", "ffn_down", "token_embd"), Kind.Q6_K),
    "attn_output": Kind.Q5_K,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Parts of a layer, in the order in which they are drawn, to what GGUF calls them."""


def float_weights(config: Mapping[str, Any]) -> Weights:
    """The model, in Hugging Face's names."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def linear(*shape: int) -> torch.Tensor:
        weight = normal(*shape) * STD
        weight[:, ::OUTLIERS] *= 3
        return weight

    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = [
        *((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)),
        *((inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)),
    ]
    weights = {"model.embed_tokens.weight": normal(vocab, hidden) * STD}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in zip(NAMES, shapes, strict=True):
            drawn = linear(*shape) if len(shape) == 2 else 1 + 0.1 * normal(*shape)
            weights[f"model.layers.{layer}.{name}.weight"] = drawn
    weights["model.norm.weight"] = 1 + 0.1 * normal(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = linear(vocab, hidden)
    return {name: weight.numpy() for name, weight in weights.items()}


def quantized(weight: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
    """Blocks, uint8 [rows, bytes]."""
    if not kind.name.endswith("_K"):
        blocks: NDArray[np.uint8] = gguf.quants.quantize(weight, kind)
        return blocks
    tool = import_module("gptqmodel.nn_modules.qlinear.gguf")
    quantize = getattr(tool, f"_gguf_quantize_{kind.name.lower()}")
    return np.asarray(quantize(weight.reshape(-1, gguf.QK_K))).reshape(len(weight), -1)


def check(folder: Path, weights: Weights, kinds: Mapping[str, Kind]) -> None:
    """Raises AssertionError where a weight is not what the folder holds of it."""
    for key, wanted in load_file(folder / "expected.safetensors").items():
        what, _, name = key.partition(".")
        if what.startswith("dequant"):
            blocks = quantized(weights[name], kinds[name])[: len(wanted)]
            assert gguf.quants.dequantize(blocks, kinds[name]).tobytes() == wanted.tobytes(), key


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        model = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
        return model.get(name.removesuffix(".weight"), "output") + ".weight"
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def interleaved(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows of q or k as the format has them for `llama`: a head's two halves in turns."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(folder: Path, kind_of: Mapping[str, Kind], usual: Kind) -> None:
    """Args: `kind_of` and `usual`: types of matrices, by a part of GGUF's name, and of the others."""
    config = json.loads((folder / "config.json").read_text())
    weights = float_weights(config)
    kinds = {
        name: kind_of.get(gguf_name(name).split(".")[-2], usual)
        for name, weight in weights.items()
        if weight.ndim == 2
    }
    check(folder, weights, kinds)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for name, weight in weights.items():
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, len(weight) // config["head_dim"])
        blocks = quantized(weight, kinds[name])
        writer.add_tensor(gguf_name(name), blocks, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(FOLDER / "gguf-q8_0", {}, Kind.Q8_0)
    write(FOLDER / "gguf-q4_0", {}, Kind.Q4_0)
    write(FOLDER / "gguf-q4_k-mixed-tied", MIXED, Kind.Q4_K)
