"""The Llama decoder, by configuration also Mistral, Qwen2 and Qwen3.

A layer: h += attention(norm(h)); h += mlp(norm(h)). The sum h is the residual; each addition is one
operation with the norm that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from pegboard.interfaces.kernel import PackedWeight
from pegboard.interfaces.model import Model
from pegboard.models.layers import LayerBuilder, RMSNorm, Rotary


def build(builder: LayerBuilder) -> Model:
    """The model factory.

    Raises:
        CheckpointError: a tensor that is missing or wrong.
    """
    return Llama(builder)


class Llama(Model):
    """A decoder whose weights are in the layers' kernels."""

    def __init__(self, builder: LayerBuilder) -> None:
        shape = builder.shape
        rotary = builder.rotary()
        self.embedding = builder.embedding("model.embed_tokens")
        layers = [DecoderLayer(builder, layer, rotary) for layer in range(shape.num_layers)]
        norms = [*(layer.input_norm for layer in layers), builder.norm("model.norm")]
        self.input_norm = norms[0]
        self.layers = list(zip(layers, norms[1:], strict=True))
        self.joint = builder.joint_layers(
            [layer.joint(builder, next_norm) for layer, next_norm in self.layers]
        )
        self.head = builder.head("model.embed_tokens" if shape.tied_embeddings else "lm_head")

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        residual = self.embedding(token_ids)
        tapped = {-1: residual.clone()} if -1 in taps else {}
        hidden = self.input_norm(residual)
        num_layers = len(self.layers)
        inner = {layer for layer in taps if 0 <= layer < num_layers}
        for first, stop in pairwise(sorted({0, *inner, num_layers})):
            if first in inner:
                tapped[first] = residual.clone()
            hidden, residual = self._run(first, stop, hidden, residual)
        return hidden, tapped

    def _run(
        self, first: int, stop: int, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Layers [first, stop)."""
        if self.joint is not None:
            return self.joint(first, stop, hidden, residual)
        for layer, next_norm in self.layers[first:stop]:
            hidden, residual = next_norm.add(*layer(hidden, residual))
        return hidden, residual

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).float()


class DecoderLayer:
    """Attention and MLP; the caller owns the norm before, and the addition and the norm after."""

    def __init__(self, builder: LayerBuilder, layer: int, rotary: Rotary) -> None:
        prefix = f"model.layers.{layer}"
        self.layer = layer
        self.input_norm = builder.norm(f"{prefix}.input_layernorm")
        self.attention = SelfAttention(builder, layer, rotary)
        self.post_attention_norm = builder.norm(f"{prefix}.post_attention_layernorm")
        self.mlp = GatedMLP(builder, f"{prefix}.mlp")

    def joint(self, builder: LayerBuilder, next_norm: RMSNorm) -> PackedWeight | None:
        """The layer and what follows it for `JointLayers`, where a kernel runs it."""
        attention, mlp = self.attention, self.mlp
        if attention.q_norm is not None or attention.k_norm is not None:
            return None
        linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        norms = (self.post_attention_norm, next_norm)
        return builder.joint_layer(self.layer, attention.attention, linears, norms)

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: the normed residual, [num_tokens, hidden_size] -> (what to add next, the residual
        to add it to). The arguments are void afterwards."""
        hidden, residual = self.post_attention_norm.add(self.attention(hidden), residual)
        return self.mlp(hidden), residual


class SelfAttention:
    """Grouped-query attention (arXiv 2305.13245) with rotary embedding."""

    def __init__(self, builder: LayerBuilder, layer: int, rotary: Rotary) -> None:
        shape, prefix = builder.shape, f"model.layers.{layer}.self_attn"
        self.shape = shape.attention[layer]
        self.qkv_proj = builder.linears([f"{prefix}.{part}_proj" for part in "qkv"])
        self.q_norm = builder.norm(f"{prefix}.q_norm") if shape.qk_norm else None
        self.k_norm = builder.norm(f"{prefix}.k_norm") if shape.qk_norm else None
        self.attention = builder.attention_layer(layer, rotary)
        self.o_proj = builder.linear(f"{prefix}.o_proj")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [num_tokens, hidden_size] -> the same shape."""
        num_tokens, shape = hidden.shape[0], self.shape
        q, k, v = (part.view(num_tokens, -1, shape.head_dim) for part in self.qkv_proj(hidden))
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return self.o_proj(self.attention(q, k, v))


class GatedMLP:
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, builder: LayerBuilder, prefix: str) -> None:
        self.gate_up_proj = builder.linears([f"{prefix}.{part}_proj" for part in ("gate", "up")])
        self.activation = builder.silu_mul()
        self.down_proj = builder.linear(f"{prefix}.down_proj")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [num_tokens, hidden_size] -> the same shape."""
        gate, up = self.gate_up_proj(hidden)
        return self.down_proj(self.activation.silu_mul(gate, up))
