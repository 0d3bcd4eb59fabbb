"""The Llama decoder, by configuration also Mistral, Qwen2 and Qwen3.

A layer: h += attention(norm(h)); h += mlp(norm(h)). The sum h is the residual; each addition is one
operation with the norm that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pegboard.interfaces.model import Model
from pegboard.models.layers import JointLayer, LayerBuilder, Rotary


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
        self.input_norms = [layer.input_norm for layer in layers]
        self.layers = [layer.joint(builder) or layer for layer in layers]
        self.norm = builder.norm("model.norm")
        self.head = builder.head("model.embed_tokens" if shape.tied_embeddings else "lm_head")

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        residual = self.embedding(token_ids)
        tapped = {-1: residual.clone()} if -1 in taps else {}
        # the norm that follows each layer: the next layer's first, or the last
        following = [*self.input_norms[1:], self.norm]
        hidden = self.input_norms[0](residual)
        for index, (layer, norm) in enumerate(zip(self.layers, following, strict=True)):
            if index in taps:
                tapped[index] = residual.clone()
            output, residual = layer(hidden, residual)
            hidden, residual = norm.add(output, residual)
        return hidden, tapped

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).float()


class DecoderLayer:
    """Attention and MLP; the caller owns the norm before and the addition after."""

    def __init__(self, builder: LayerBuilder, layer: int, rotary: Rotary) -> None:
        prefix = f"model.layers.{layer}"
        self.layer = layer
        self.input_norm = builder.norm(f"{prefix}.input_layernorm")
        self.attention = SelfAttention(builder, layer, rotary)
        self.post_attention_norm = builder.norm(f"{prefix}.post_attention_layernorm")
        self.mlp = GatedMLP(builder, f"{prefix}.mlp")

    def joint(self, builder: LayerBuilder) -> JointLayer | None:
        """The same in one call, where a kernel has it."""
        attention, mlp = self.attention, self.mlp
        if attention.q_norm is not None or attention.k_norm is not None:
            return None
        linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        return builder.joint_layer(
            self.layer, attention.attention, linears, self.post_attention_norm
        )

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: the normed residual, [num_tokens, hidden_size] -> (what to add next, the residual
        to add it to). `residual` is void afterwards."""
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
