"""From GGUF's words to Hugging Face's: the model's config and the tensors' names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import TensorFact
from pegboard_gguf.header import StoredTensor
from pegboard_gguf.metadata import Metadata
from pegboard_gguf.rope import rope_parameters

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# ggml's plain element types; every other type is a block format that a quantizer reads.
PLAIN_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}

# Folded into the config's `rope_parameters`.
ROPE_FACTORS = "rope_freqs.weight"

_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")
_MODEL = re.compile(r"(\w+)\.(weight|bias)")


def tensor_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; its own name where there is none."""
    if (match := _LAYER.fullmatch(name)) and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    if (match := _MODEL.fullmatch(name)) and match[1] in _MODEL_NAMES:
        return f"{_MODEL_NAMES[match[1]]}.{match[2]}"
    return name


def tensor_facts(tensors: Mapping[str, StoredTensor]) -> dict[str, TensorFact]:
    """Facts of all weights by Hugging Face's names."""
    facts = {}
    for tensor in tensors.values():
        if tensor.name == ROPE_FACTORS:
            continue
        dtype = PLAIN_DTYPES.get(tensor.type)
        facts[tensor_name(tensor.name)] = TensorFact(
            shape=tensor.shape,
            dtype=dtype or "uint8",
            format="plain" if dtype else tensor.type,
            num_bytes=tensor.num_bytes,
        )
    return facts


def model_config(
    metadata: Metadata,
    tensors: Mapping[str, StoredTensor],
    rope_factors: NDArray[np.float32] | None,
) -> dict[str, Any]:
    """The config that Hugging Face's `config.json` of the same model would hold.

    Raises:
        CheckpointError: an architecture or a setting that this package does not read.
    """
    architecture = metadata.architecture
    if architecture not in ARCHITECTURES:
        raise metadata.fault(
            "general.architecture", f"is {architecture!r}", ", ".join(ARCHITECTURES)
        )
    if metadata.whole(".expert_count", 0) > 0:
        raise metadata.fault(".expert_count", "says a mixture of experts", "dense models")
    if not metadata.flag(".attention.causal", default=True):
        raise metadata.fault(".attention.causal", "is False", "True")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "vocab_size": _vocab_size(metadata, tensors),
        "hidden_size": metadata.whole(".embedding_length"),
        "intermediate_size": metadata.whole(".feed_forward_length"),
        "num_hidden_layers": metadata.whole(".block_count"),
        "max_position_embeddings": metadata.whole(".context_length"),
        "rms_norm_eps": metadata.real(".attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    config |= _attention(metadata, config["hidden_size"])
    config["rope_parameters"] = rope_parameters(metadata, config["head_dim"], rope_factors)
    if architecture == "llama":
        config |= _llama_variant(metadata, tensors)
    return config


def _vocab_size(metadata: Metadata, tensors: Mapping[str, StoredTensor]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{metadata.path}: tensor 'token_embd.weight'", "is missing")
    return embedding.shape[0]


def _attention(metadata: Metadata, hidden_size: int) -> dict[str, int]:
    num_heads = metadata.whole(".attention.head_count")
    if num_heads < 1:
        raise metadata.fault(".attention.head_count", f"is {num_heads}", "1 and more")
    head_dim = metadata.whole(".attention.key_length", hidden_size // num_heads)
    value_dim = metadata.whole(".attention.value_length", head_dim)
    if value_dim != head_dim:
        raise metadata.fault(".attention.value_length", f"is {value_dim}", f"key length {head_dim}")
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.whole(".attention.head_count_kv", num_heads),
        "head_dim": head_dim,
    }


def _llama_variant(metadata: Metadata, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Mistral's models are written as `llama`; a window tells them apart."""
    window = metadata.whole(".attention.sliding_window", 0)
    if window > 0:
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
