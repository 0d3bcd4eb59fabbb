"""Tiny seeded models of odd shapes, written as checkpoints that any implementation can read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import tokenizers
    import torch

TokenizerKind = Literal["byte_level", "byte_fallback", "unigram"]
"""The kind of tokenizer: byte-level BPE; BPE whose unknown characters are byte tokens, as SentencePiece
writes it; a unigram model with neither."""

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
"""Sizes that no kernel's tile divides, as the first odd model will have them."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
_SPACE = "\u2581"  # what SentencePiece writes for a space
_PLAIN_CHARACTERS = f"{_SPACE}etaoinshrdlucmfwypvbgkjqxz.,!?0123456789"
_WIDE_CHARACTERS = "日本語中文한국😀👩👧❤\u200d\ufe0féü"
_CORPUS = ["the quick brown fox jumps over the lazy dog and the dog does not mind the fox at all"]


def write_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: bool | TokenizerKind = False,
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
        tokenizer: also write a tokenizer with a chat template: of this kind, or (True) byte-level.
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
        kind = "byte_level" if tokenizer is True else tokenizer
        write_tiny_tokenizer(folder, config["vocab_size"], kind)
    return folder


def write_tiny_tokenizer(
    folder: Path, vocab_size: int = 517, kind: TokenizerKind = "byte_level"
) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`.

    Ids past the tokenizer's own vocabulary, up to `vocab_size`, decode to nothing, as in models
    whose embedding is padded. The kinds with bytes know all 256.
    """
    make = {"byte_level": _byte_level, "byte_fallback": _byte_fallback, "unigram": _unigram}
    tokenizer = make[kind](min(vocab_size, 320))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _byte_level(vocab_size: int) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _byte_fallback(vocab_size: int) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    texts = [*_SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    characters = [c for c in _PLAIN_CHARACTERS if c not in texts][: vocab_size - len(texts)]
    vocabulary = {text: index for index, text in enumerate([*texts, *characters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in _SPECIAL_TOKENS])
    return tokenizer


def _unigram(vocab_size: int) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = [
        "the",
        "dog",
        "fox",
        f"{_SPACE}the",
        f"{_SPACE}dog",
        "日本",
        "👩\u200d👩\u200d👧",
        "❤\ufe0f",
    ]
    pieces = [*_SPECIAL_TOKENS, "<unk>", *words, *_PLAIN_CHARACTERS, *_WIDE_CHARACTERS]
    scores = [(piece, -float(index)) for index, piece in enumerate(pieces[:vocab_size])]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=len(_SPECIAL_TOKENS)))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in _SPECIAL_TOKENS])
    return tokenizer


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
