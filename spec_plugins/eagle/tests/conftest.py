"""Heads of odd sizes, written in the layouts that are found in the wild."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pegboard.testing.tiny import write_tiny_model

HIDDEN, INNER, VOCAB, NUM_LAYERS = 40, 72, 517, 7
"""Of the target."""


@dataclass(frozen=True)
class Head:
    """A head as its trainer wrote it.

    Attributes:
        is_third: whether it is EAGLE-3.
        layer: prefix of its first layer.
        prefix: of all names.
        heads, kv_heads, head_dim, inner, num_layers: its sizes.
        draft_vocab: its own vocabulary; None: the target's.
        taps: target layers whose inputs it reads.
        has: optional tensors.
        config: keys of `config.json` beside the sizes.
        is_speculators: whether the config is in the layout of speculators.
        theta: rotary base.
    """

    is_third: bool
    layer: str
    prefix: str = ""
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 14
    inner: int = 50
    num_layers: int = 1
    draft_vocab: int | None = None
    taps: tuple[int, ...] = (2, 3, 4)
    has: frozenset[str] = frozenset()
    config: Mapping[str, Any] = field(default_factory=dict)
    is_speculators: bool = False
    theta: float = 10000.0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names, with `midlayer` or whatever the layout says, and shapes."""
        vocab = self.draft_vocab or VOCAB
        shapes: dict[str, tuple[int, ...]] = {}
        if self.is_third:
            shapes["fc.weight"] = (HIDDEN, len(self.taps) * HIDDEN)
            shapes["norm.weight"] = (HIDDEN,)
            shapes[f"{self.layer}.hidden_norm.weight"] = (HIDDEN,)
            shapes[f"{self.layer}.input_layernorm.weight"] = (HIDDEN,)
        else:
            shapes["fc.weight"] = (HIDDEN, 2 * HIDDEN)
        for number in range(self.num_layers):
            layer = self.layer if not number else f"layers.{number}"
            inputs = 2 * HIDDEN if self.is_third and not number else HIDDEN
            q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
            shapes |= {
                f"{layer}.self_attn.q_proj.weight": (q, inputs),
                f"{layer}.self_attn.k_proj.weight": (kv, inputs),
                f"{layer}.self_attn.v_proj.weight": (kv, inputs),
                f"{layer}.self_attn.o_proj.weight": (HIDDEN, q),
                f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
                f"{layer}.mlp.gate_proj.weight": (self.inner, HIDDEN),
                f"{layer}.mlp.up_proj.weight": (self.inner, HIDDEN),
                f"{layer}.mlp.down_proj.weight": (HIDDEN, self.inner),
            }
            if number:
                shapes[f"{layer}.input_layernorm.weight"] = (HIDDEN,)
            if "qk_norm" in self.has:
                shapes[f"{layer}.self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{layer}.self_attn.k_norm.weight"] = (self.head_dim,)
        if "fc.bias" in self.has:
            shapes["fc.bias"] = (HIDDEN,)
        if "fc_norm" in self.has:
            shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(len(self.taps))}
        if "input_norm" in self.has:
            shapes["input_norm.weight"] = (len(self.taps) * HIDDEN,)
        if "embed_tokens" in self.has:
            shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
        if "lm_head" in self.has:
            shapes["lm_head.weight"] = (vocab, HIDDEN)
        return {self.prefix + name: shape for name, shape in shapes.items()}


HEADS = {
    "EAGLE-1": Head(is_third=False, layer="layers.0", has=frozenset({"fc.bias"}), kv_heads=3),
    "EAGLE-1, all its own": Head(
        is_third=False,
        layer="layers.0",
        prefix="model.",
        has=frozenset({"embed_tokens", "lm_head"}),
        config={"bias": False},
    ),
    "EAGLE-3": Head(
        is_third=True,
        layer="midlayer",
        draft_vocab=203,
        has=frozenset({"lm_head"}),
        config={"architectures": ["LlamaForCausalLMEagle3"], "norm_output": True},
        theta=500000.0,
    ),
    "EAGLE-3 of the whole vocabulary": Head(
        is_third=True, layer="midlayer", has=frozenset({"lm_head", "embed_tokens"}), head_dim=20
    ),
    "EAGLE-3 of speculators": Head(
        is_third=True,
        layer="layers.0",
        is_speculators=True,
        draft_vocab=203,
        heads=4,
        kv_heads=2,
        head_dim=24,
        num_layers=2,
        taps=(5, 1, 6),
        has=frozenset({"lm_head", "qk_norm"}),
        config={
            "eagle_aux_hidden_state_layer_ids": [5, 1, 6],
            "norm_before_residual": True,
        },
    ),
    "EAGLE-3.1": Head(
        is_third=True,
        layer="layers.0",
        is_speculators=True,
        draft_vocab=203,
        has=frozenset({"lm_head", "fc_norm"}),
        config={"fc_norm": True, "norm_output": True},
    ),
    "EAGLE-3, taps normed together": Head(
        is_third=True,
        layer="layers.0",
        is_speculators=True,
        has=frozenset({"lm_head", "input_norm"}),
        config={"norm_before_fc": True},
    ),
}


def write_head(folder: Path, head: Head, seed: int = 3) -> Path:
    """Writes `config.json` and `model.safetensors`; the same arguments give the same bits."""
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in head.shapes().items():
        values = torch.randn(shape, generator=chance, dtype=torch.float64)
        is_vector = len(shape) == 1
        tensors[name] = 1 + 0.2 * values if is_vector else values / shape[1] ** 0.5
        if "lm_head" in name:
            tensors[name] *= 2
    if head.draft_vocab is not None:
        ids = torch.randperm(VOCAB, generator=chance)[: head.draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, value=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(head)))
    return folder


def config_of(head: Head) -> dict[str, Any]:
    """The head's `config.json`."""
    layer = {
        "hidden_size": HIDDEN,
        "intermediate_size": head.inner,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "head_dim": head.head_dim,
        "num_hidden_layers": head.num_layers,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
    }
    if head.theta != 10000.0:
        layer["rope_theta"] = head.theta
    config: dict[str, Any] = dict(head.config)
    if head.draft_vocab is not None:
        config["draft_vocab_size"] = head.draft_vocab
    if head.is_speculators:
        return {**config, "speculators_model_type": "eagle3", "transformer_layer_config": layer}
    return {**config, **layer, "vocab_size": VOCAB}


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target in float64."""
    folder = tmp_path_factory.mktemp("target") / "m"
    return write_tiny_model(folder, dtype="float64", num_hidden_layers=NUM_LAYERS, vocab_size=VOCAB)


@pytest.fixture(scope="session")
def heads() -> Mapping[str, Head]:
    """Heads by layout."""
    return HEADS


@pytest.fixture(scope="session")
def write() -> Callable[..., Path]:
    """Writes a head."""
    return write_head
