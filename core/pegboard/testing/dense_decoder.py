"""A decoder of the Llama family by its formulas, in float64 over one whole text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pegboard.interfaces.model import AttentionShape
from pegboard.testing.attention_reference import DenseAttention, rotate_reference

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]


class DenseDecoder:
    """Llama, Mistral, Qwen2, Qwen3 without scaled rotary embedding.

    Args:
        config: in Hugging Face's keys, all of them said.
        tensors: the checkpoint's, by Hugging Face's names.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Tensors) -> None:
        self._config = config
        self._tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def forward(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Logits [num_tokens, vocab_size], and the input of each layer [num_tokens, hidden_size];
        -1 is the embedding's output."""
        hidden = self._tensors["model.embed_tokens.weight"][list(token_ids)]
        taps = {-1: hidden}
        for layer in range(self._config["num_hidden_layers"]):
            taps[layer] = hidden
            hidden = self.layer(layer, hidden)
        tied = self._config["tie_word_embeddings"]
        head = self._tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return self._norm(hidden, "model.norm") @ head.T, taps

    def layer(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """The output of a decoder layer, float64 [num_tokens, hidden_size], as its input."""
        prefix = f"model.layers.{index}"
        normed = self._norm(hidden, f"{prefix}.input_layernorm")
        hidden = hidden + self._attention(normed, f"{prefix}.self_attn")
        normed = self._norm(hidden, f"{prefix}.post_attention_layernorm")
        return hidden + self._mlp(normed, f"{prefix}.mlp")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps: float = self._config["rms_norm_eps"]
        root = (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return x / root * self._tensors[f"{name}.weight"]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self._tensors[f"{name}.weight"].T
        return y + self._tensors[f"{name}.bias"] if f"{name}.bias" in self._tensors else y

    def _mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate = self._linear(x, f"{prefix}.gate_proj")
        gated = gate / (1.0 + (-gate).exp()) * self._linear(x, f"{prefix}.up_proj")
        return self._linear(gated, f"{prefix}.down_proj")

    def _attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        import torch

        head_dim = self._config["head_dim"]
        q, k, v = (
            self._linear(x, f"{prefix}.{name}_proj").view(len(x), -1, head_dim) for name in "qkv"
        )
        if f"{prefix}.q_norm.weight" in self._tensors:
            q, k = self._norm(q, f"{prefix}.q_norm"), self._norm(k, f"{prefix}.k_norm")
        positions = torch.arange(len(x))
        q, k = (rotate_reference(one, positions, *self._angles(len(x))) for one in (q, k))
        window = self._config.get("sliding_window") if self._windowed else None
        shape = AttentionShape(q.shape[1], k.shape[1], head_dim, head_dim**-0.5, window)
        dense = DenseAttention(shape, list(k), list(v), list(range(len(x))))
        rows = [dense.attend(q[at], at, range(at + 1))[0] for at in range(len(x))]
        return self._linear(torch.stack(rows).flatten(1), f"{prefix}.o_proj")

    @property
    def _windowed(self) -> bool:
        return bool(self._config.get("use_sliding_window", True))

    def _angles(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin; frequencies are rounded to float32, as models were trained."""
        import torch

        head_dim = self._config["head_dim"]
        theta = self._config["rope_parameters"]["rope_theta"]
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(
            torch.arange(num_positions).double(), (1.0 / theta**exponents).double()
        )
        return angles.cos(), angles.sin()
