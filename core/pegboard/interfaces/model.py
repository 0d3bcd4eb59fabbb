"""`Model`: the architecture. Described without torch for the planner, built with torch for the worker.

A model's manifest entry names a torch-free function `describe(config) -> ModelShape`. The runner
builds its layers from the same shape, so that plan and engine cannot disagree.

The config, a dict, remembers which of its keys `describe` read by `[]` or `get`, and of sections that it
read, which of theirs. To read a key is to act on it: a key that can change arithmetic, has a value that
means something, and was not read is refused by name before anything is loaded. So a family reads each key
that it knows, also one that changes nothing beside others, and no other; it passes the config on as it is,
since of a copy nothing is known to be read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

VERSION = 1

ParameterKind = Literal["linear", "embedding", "norm", "bias", "head"]

QUANTIZABLE: tuple[ParameterKind, ...] = ("linear", "embedding", "head")
"""Kinds that a quantizer decides on: matrices."""


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """A parameter as the unquantized checkpoint names it.

    Attributes:
        name: its full name (`model.layers.0.self_attn.q_proj.weight`).
        shape: its logical shape; a linear weight is [out_features, in_features].
        kind: what it is; quantizers act on `linear`, `embedding` and `head`.
        shard_axis: the axis that tensor parallelism may split; None: replicated.
    """

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind
    shard_axis: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One decoder layer's attention.

    Attributes:
        num_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: key and value heads.
        head_dim: elements a head.
        scale: factor of q·k.
        window: last tokens visible, the token itself included; None: all.
        soft_cap: scores become cap * tanh(score / cap); None: off (Gemma 2, arXiv 2408.00118).
        skipped: a row's first tokens that the layer has no keys for: no token attends to their slots.
            The first token after them has position 0.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class RopeShape:
    """Rotary position embedding (arXiv 2104.09864), halves-first pairing.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: elements of a head that are rotated.
        scaling: rule and its numbers as the checkpoint's config gives them; None: plain.
    """

    theta: float
    rotary_dim: int
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything that planning and building need to know about a model, without a tensor.

    Attributes:
        architecture: the checkpoint's own name for it.
        vocab_size, hidden_size, intermediate_size: sizes.
        max_position: the longest context it was made for, in tokens.
        norm_eps: added to the mean square in RMSNorm.
        attention: one entry a decoder layer.
        rope: rotary embedding.
        tied_embeddings: the output head is the embedding.
        qk_norm: q and k are RMS-normalised per head before rotation.
        parameters: every parameter, in loading order; biases included.
        ignored: names (fnmatch patterns) of checkpoint tensors that carry nothing to load.
        tensor_parallel: numbers of devices that its axes can be split over.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position: int
    norm_eps: float
    attention: tuple[AttentionShape, ...]
    rope: RopeShape
    tied_embeddings: bool
    qk_norm: bool
    parameters: tuple[ParameterShape, ...]
    ignored: tuple[str, ...] = ()
    tensor_parallel: tuple[int, ...] = (1,)

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def taps(self) -> range:
        """Hidden states that can be had: the inputs of decoder layers; -1: the embedding's output;
        `num_layers`: the state after the final norm."""
        return range(-1, self.num_layers + 1)


class Model(ABC):
    """A decoder on one worker. Its factory takes a `models.layers.LayerBuilder`."""

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Runs all tokens of a step through the decoder; attention reads and writes the paged KV
        that its backend was prepared with.

        Args:
            token_ids: int64 [num_tokens].
            positions: int64 [num_tokens], logical positions.
            taps: decoder layers whose input hidden states are wanted; -1: the embedding's output.

        Returns:
            Final hidden states after the last norm, [num_tokens, hidden_size] in the model's dtype,
            and the tapped ones by layer, the same shape.
        """

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The first layer's input for tokens, int64 [num_tokens] -> [num_tokens, hidden_size] in the
        model's dtype."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] of final hidden states [num_rows, hidden_size]."""
