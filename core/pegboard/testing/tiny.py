"""Tiny seeded models of odd shapes, written as checkpoints that any implementation can read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 16,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": False,
    },
}
"""Family to the part of its config that is its own."""

ODD_SHAPE: dict[str, Any] = {
    "vocab_size": 517,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Sizes that no kernel's tile divides: what breaks on them breaks on the first odd model."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
_CORPUS = ["the quick brown fox jumps over the lazy dog and the dog does not mind the fox at all"]


def write_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Writes `config.json`, `model.safetensors` and, when asked, a tokenizer into `folder`.

    Weights are normal, scaled so that activations keep their size and the logits tell tokens apart;
    the same arguments give the same bits.

    Args:
        folder: made where it does not exist.
        family: a key of `FAMILIES`.
        seed: of the weights.
        dtype: of the weights: `float32`, `float64`, `bfloat16`, `float16`.
        tokenizer: also write a byte-level BPE tokenizer with a chat template.
        overrides: config keys that differ from `ODD_SHAPE` (`num_hidden_layers=4`).

    Returns:
        The folder.

    Raises:
        KeyError: no such family.
    """
    import torch
    from safetensors.torch import save_file

    config = {**ODD_SHAPE, **FAMILIES[family], "dtype": dtype, **overrides}
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _weight(name, shape, generator).to(getattr(torch, dtype))
        for name, shape in parameter_shapes(config).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        write_tiny_tokenizer(folder, config["vocab_size"])
    return folder


def write_tiny_tokenizer(folder: Path, vocab_size: int = 517) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`: byte-level BPE, all 256 bytes known.

    Ids past the tokenizer's own vocabulary, up to `vocab_size`, decode to nothing, as in models
    whose embedding is padded.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 320),
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def parameter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a config's checkpoint, in Hugging Face's names."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{k}": v for k, v in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config["model_type"] == "qwen2":
        sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        shapes |= {f"self_attn.{name}.bias": (size,) for name, size in sizes.items()}
    if config["model_type"] == "qwen3":
        shapes |= {f"self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def _weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    import torch

    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if "norm" in name:
        return 1.0 + 0.1 * values
    if name.endswith("bias"):
        return 0.1 * values
    if "embed_tokens" in name:
        return values
    gain = 2.0 if name == "lm_head.weight" else 1.0
    return gain * values / math.sqrt(shape[-1])
