"""`Kernel`: how one operation runs on one device.

Kernels are registered by (operation, format, activation dtype, device) with a priority; the resolver
picks one for each operation that the model needs. A kernel that promises `row_invariant` gives each
row the same bits for any batch size, position in the batch, chunking, padding and thread count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    import torch

    from pegboard.interfaces.quantizer import LinearWeight

VERSION = 1

OPERATIONS = ("linear", "rms_norm", "rotary", "silu_mul", "sample")
"""The operations that an engine asks for."""

REJECTION_OPERATIONS = ("probabilities",)
"""Asked for beside these where drafts are verified by rejection."""

JOINT_OPERATIONS = {"decoder_layer": ("linear", "rms_norm", "silu_mul")}
"""Operations that do the work of several others and of attention in one call, with the same bits. One is
used where the same kernel family was chosen for all that it joins and the attention backend is of that
family's plugin. In a layer that it cannot run, the joined operations run one by one."""

PackedWeight = NewType("PackedWeight", object)
"""A weight in a kernel's own layout: opaque, and never shared between packages."""


@dataclass(frozen=True, slots=True)
class KernelContext:
    """The context of a kernel's factory.

    Attributes:
        operation: one of `OPERATIONS`, `REJECTION_OPERATIONS` or `JOINT_OPERATIONS`.
        format: weight format, `float` where the operation has no weight.
        activation_dtype: `float32`, `bfloat16`, ...
        device: `cpu` or `cuda`.
        num_threads: threads it may use on a CPU.
    """

    operation: str
    format: str
    activation_dtype: str
    device: str
    num_threads: int


class Kernel(ABC):
    """The base of all kernels: a test of themselves, run before weights load."""

    @abstractmethod
    def self_test(self) -> None:
        """Computes a small tile and compares it with known values.

        Raises:
            AssertionError: the kernel is wrong on this machine.
        """


class LinearKernel(Kernel):
    """Operation `linear`: y = x·Wᵀ, and rows of W for embeddings where `gathers`."""

    gathers: bool
    """Whether a packed weight serves `gather_rows` too, so that a tied weight is kept once."""

    @abstractmethod
    def prepare(self, weight: LinearWeight) -> PackedWeight:
        """The weight in the kernel's own layout, which may keep references to the weight's tensors."""

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """x: [num_rows, in_features] in the activation dtype -> [num_rows, out_features]."""

    @abstractmethod
    def gather_rows(self, weight: PackedWeight, row_ids: torch.Tensor) -> torch.Tensor:
        """row_ids: int64 [num_rows] -> [num_rows, in_features] in the activation dtype."""


class RMSNormKernel(Kernel):
    """Operation `rms_norm` (arXiv 1910.07467)."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last axis; x: [..., n], weight: [n].

        Mean and root are in float32 (in float64 for float64).
        """

    @abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual). May write into `x` and `residual`."""


class RotaryKernel(Kernel):
    """Operation `rotary`: for attention backends that do not fuse it."""

    @abstractmethod
    def rotate(
        self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Rotates element pairs (i, i + n) of each head, n = half of the rotated elements.

        x: [num_tokens, num_heads, head_dim]; positions: int64 [num_tokens];
        cos, sin: float32 or float64 [max_position, n]. Elements past 2n stay.
        """


class SiluMulKernel(Kernel):
    """Operation `silu_mul`."""

    @abstractmethod
    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [num_rows, n] each. May write into `gate`."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Sampling parameters, one entry a logit row.

    Attributes:
        temperature: float32 [num_rows]; 0: greedy.
        top_k: int64 [num_rows]; 0: all.
        top_p, min_p: float32 [num_rows].
        seed: int64 [num_rows], the bits of the unsigned 64-bit seed.
        position: int64 [num_rows], the sampled token's position in the sequence (i).
        index: int64 [num_rows], the sequence's number in its request (n).
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    index: torch.Tensor


class SampleKernel(Kernel):
    """Operation `sample`: filters, noise, argmax, the one way a token is chosen."""

    @abstractmethod
    def sample(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """Token ids, int64 [num_rows], of processed logits, float32 [num_rows, vocab_size].

        A greedy row is the argmax, ties to the lower id. Otherwise, with z = logits / temperature in
        float32:
        1. top_k keeps the k largest z; top_p keeps the shortest prefix, in descending z, of what is
           left whose softmax (over what is left, in float64) reaches top_p; min_p keeps
           z >= max(z) + ln(min_p), the logarithm in float64 and rounded to float32.
           Equal z are ordered by token id, lower first, so that a filter never keeps a higher id
           and drops a lower one of the same z (min_p keeps or drops both).
        2. The token is the argmax over the kept ids of z + g, ties to the lower id, where
           g = -ln(-ln((x + 0.5) / 2**32)), evaluated in float64 and rounded to float32, and x is the
           first word of Philox4x32-10 (Salmon et al. 2011) with key (low, high word of the seed)
           and counter (token id, position, index, 0).

        Logits of -inf are never chosen while another is finite. Does not change `logits`.
        """


class ProbabilitiesKernel(Kernel):
    """Operation `probabilities`: the distribution from which `sample` draws."""

    @abstractmethod
    def probabilities(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """float64 [num_rows, vocab_size], of processed logits, float32 of the same shape.

        Of a row with a temperature the softmax, in float64, of z over the ids that the filters of
        `SampleKernel.sample` keep, and 0 at all others. Of a greedy row, and of one that has a logit of
        +inf, 1 at the argmax, ties to the lower id. Seed, position and index are not read. Does not
        change `logits`.
        """
