"""The layers of a head: features of the target's states, decoder layers, and the way to tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pegboard.errors import CheckpointError
from pegboard.interfaces.drafter import DrafterContext
from pegboard.models.layers import LayerBuilder, RMSNorm, Rotary
from pegboard_eagle.layout import D2T, T2D, HeadLayout


class EagleLayers:
    """A head with its weights. Of n rows each:

    EAGLE-1: x = fc([e, f]); state = layer(x), which imitates the target's state after its final norm;
        the target's own head reads it.
    EAGLE-3: f = fc([taps]); layer 0 attends over [norm(e), norm(f)] with f for its residual; a norm and
        a head of its own read the state. Where a state stands in for the next feature, it skips fc.

    e is the embedding of the token after the feature's.
    """

    def __init__(self, builder: LayerBuilder, layout: HeadLayout, context: DrafterContext) -> None:
        names = layout.names
        self.layout = layout
        self.context = context
        self.fc = builder.linear(names["fc"])
        self.tap_norms = [
            builder.norm(names[f"fc_norm.{i}"])
            for i in range(len(layout.taps))
            if f"fc_norm.{i}" in names
        ]
        self.fc_input_norm = _norm(builder, layout, "input_norm")
        self.norm = _norm(builder, layout, "norm")
        rotary = builder.rotary()
        self.layers = [
            _Layer(builder, layout, layer, rotary) for layer in range(layout.shape.num_layers)
        ]
        own = names.get("embed_tokens")
        self.embed = context.embed if own is None else builder.embedding(own)
        self.head = builder.head(names["lm_head"]) if "lm_head" in names else None
        self.target_ids = _target_ids(builder, layout, context)

    def features(self, taps: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Features of the target's states: by tap [N, its hidden_size] -> [N, size of a feature]."""
        states = [taps[tap] for tap in self.layout.taps]
        if not self.layout.reads_embedding:
            return states[0]
        if self.tap_norms:
            states = [norm(x) for norm, x in zip(self.tap_norms, states, strict=True)]
        joined = torch.cat(states, dim=1)
        if self.fc_input_norm is not None:
            joined = self.fc_input_norm(joined)
        return self.fc(joined)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        assert hidden is not None
        embedded = self.embed(token_ids)
        first, *others = self.layers
        if self.layout.reads_embedding:
            assert first.input_norm is not None and first.hidden_norm is not None
            normed = first.hidden_norm(hidden)
            residual = normed if self.layout.norms_residual else hidden
            x = first(torch.cat((first.input_norm(embedded), normed), dim=1), residual)
        else:
            joined = self.fc(torch.cat((embedded, hidden), dim=1))
            normed = joined if first.input_norm is None else first.input_norm(joined)
            x = first(normed, joined)
        for layer in others:
            assert layer.input_norm is not None
            x = layer(layer.input_norm(x), x)
        return x

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [N, draft vocabulary] of states [N, hidden_size]."""
        states = states if self.norm is None else self.norm(states)
        return self.context.logits(states) if self.head is None else self.head(states).float()

    def fed_back(self, states: torch.Tensor) -> torch.Tensor:
        """States in the place of the next features: [N, hidden_size], both."""
        return self.norm(states) if self.norm is not None and self.layout.feeds_normed else states


class _Layer:
    """A decoder layer; the caller norms its input."""

    def __init__(
        self, builder: LayerBuilder, layout: HeadLayout, layer: int, rotary: Rotary
    ) -> None:
        prefix, names = f"layers.{layer}", layout.names
        self.head_dim = layout.shape.attention[layer].head_dim
        self.input_norm = _norm(builder, layout, f"{prefix}.input_layernorm")
        self.hidden_norm = _norm(builder, layout, f"{prefix}.hidden_norm")
        self.qkv = builder.linears([names[f"{prefix}.self_attn.{part}_proj"] for part in "qkv"])
        self.q_norm = _norm(builder, layout, f"{prefix}.self_attn.q_norm")
        self.k_norm = _norm(builder, layout, f"{prefix}.self_attn.k_norm")
        self.attention = builder.attention_layer(layer, rotary)
        self.o = builder.linear(names[f"{prefix}.self_attn.o_proj"])
        post_norm = _norm(builder, layout, f"{prefix}.post_attention_layernorm")
        assert post_norm is not None
        self.post_norm = post_norm
        gate_up = [names[f"{prefix}.mlp.{part}_proj"] for part in ("gate", "up")]
        self.gate_up = builder.linears(gate_up)
        self.activation = builder.silu_mul()
        self.down = builder.linear(names[f"{prefix}.mlp.down_proj"])

    def __call__(self, normed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """normed: [N, inputs of q, k and v]; residual: [N, hidden_size] -> the latter's shape."""
        q, k, v = (part.view(len(normed), -1, self.head_dim) for part in self.qkv(normed))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        x = residual + self.o(self.attention(q, k, v))
        gate, up = self.gate_up(self.post_norm(x))
        return x + self.down(self.activation.silu_mul(gate, up))


def _norm(builder: LayerBuilder, layout: HeadLayout, name: str) -> RMSNorm | None:
    """The norm of that name; None: the head has none."""
    return builder.norm(layout.names[name]) if name in layout.names else None


def _target_ids(
    builder: LayerBuilder, layout: HeadLayout, context: DrafterContext
) -> torch.Tensor | None:
    """int64 [draft vocabulary], the target's id of each; None: they are the same.

    Raises:
        CheckpointError: two ids are one, one is none of the target's, or `t2d` says others.
    """
    if D2T not in layout.names:
        return None
    name = layout.names[D2T]
    offsets = builder.source.read(name)
    builder.on_tensor(name)
    ids = torch.arange(len(offsets)) + offsets.to(torch.int64)
    inside = bool(((ids >= 0) & (ids < context.vocab_size)).all())
    if not inside or len(torch.unique(ids)) < len(ids):
        raise CheckpointError(
            f"tensor {name}",
            "maps ids to none or twice",
            allowed=f"offsets to ids from 0 to {context.vocab_size - 1}, each once",
        )
    if T2D in layout.names:
        builder.on_tensor(layout.names[T2D])
        in_draft = builder.source.read(layout.names[T2D]).bool()
        if int(in_draft.sum()) != len(ids) or not bool(in_draft[ids].all()):
            raise CheckpointError(
                f"tensor {layout.names[T2D]}", f"marks other tokens than {name} maps to"
            )
    return ids.to(context.device)
