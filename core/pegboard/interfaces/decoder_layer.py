"""The joint operation `decoder_layer`: what its kernels get, and what they do.

It joins operations of `Kernel` with an attention backend, so it stands above both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.interfaces.kernel import Kernel, PackedWeight

if TYPE_CHECKING:
    import torch

    from pegboard.interfaces.attention import AttentionBackend, RotaryTable
    from pegboard.interfaces.model import AttentionShape


@dataclass(frozen=True, slots=True)
class DecoderLayerParts:
    """A Llama-type decoder layer without biases and norms of q and k.

    Attributes:
        layer: its number.
        attention: shape of its attention.
        backend: the worker's attention backend.
        rotary: angles; None: no rotation.
        qkv, o, gate_up, down: weights packed by the family's linear kernel; q, k, v and gate, up are
            joined along the output, in this order.
        norm, next_norm: [hidden_size], weights of the norms between attention and MLP, and after the
            layer (the next one's, or the model's last); `eps` is added to the means of both.
    """

    layer: int
    attention: AttentionShape
    backend: AttentionBackend
    rotary: RotaryTable | None
    qkv: PackedWeight
    o: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    norm: torch.Tensor
    next_norm: torch.Tensor
    eps: float


class DecoderLayerKernel(Kernel):
    """Joint operation `decoder_layer`: layers that follow each other, in one call."""

    @abstractmethod
    def prepare(self, parts: DecoderLayerParts) -> PackedWeight | None:
        """Readies a layer; None: this kernel cannot run it."""

    @abstractmethod
    def decoder_layers(
        self, layers: Sequence[PackedWeight], hidden: torch.Tensor, residual: torch.Tensor
    ) -> None:
        """For each layer in order: h += attention(x); h += mlp(norm(h)); x = next_norm(h).

        hidden: x, the normed residual; residual: h; both [num_tokens, hidden_size] in the activation
        dtype, and both changed in place.
        """
