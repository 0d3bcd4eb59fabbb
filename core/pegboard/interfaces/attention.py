"""`AttentionBackend`: KV layout and attention.

A backend's manifest entry names a torch-free function `layout(group) -> tuple[TensorSpec, ...]`, the
tensors of a block of one layer. The planner sums their bytes; the runner allocates by the same answer and
gives the backend views. Nothing but the backend writes KV.

An encoding keeps each number as a code of one byte, with a float32 scale for each token and KV head:

    scale = amax / largest over the token's head, or what the checkpoint says of layer and head
    code  = x / scale, rounded to the nearest code, ties to even, at most `largest` in size
    x is read back as code * scale

all in float32. `int8` has whole numbers and 127 for its largest, `fp8_e4m3` the numbers of e4m3 and 448.
Where the scale is 0, so are the codes; where x holds what is not finite, the head is read back as NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pegboard.interfaces.kernel import RotaryKernel
    from pegboard.interfaces.kv import KVGroup
    from pegboard.interfaces.model import AttentionShape

VERSION = 0

ENCODINGS = {"int8": "int8", "fp8_e4m3": "float8"}
"""Encodings by name, and the `KVScales.codes` that each can take as static scales."""


@dataclass(frozen=True, slots=True)
class KVScales:
    """Static scales of a decoder layer's keys and values: a key is what is kept times its scale.

    Attributes:
        codes: what they are for, `float8` or `int8`.
        k, v: a scale of each KV head, positive and finite.
    """

    codes: str
    k: tuple[float, ...]
    v: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """The context of a backend's factory.

    Attributes:
        layers: attention of each decoder layer.
        groups: KV groups; each layer is in one.
        max_num_seqs: most rows of a step.
        dtype: activation dtype.
        device: `cpu` or `cuda`.
        num_threads: threads it may use on a CPU.
        rotary: kernel to call first, for a backend that does not fuse the rotation.
        kv_scales: by decoder layer, those that the checkpoint holds, for encodings that take them.
    """

    layers: tuple[AttentionShape, ...]
    groups: tuple[KVGroup, ...]
    max_num_seqs: int
    dtype: str
    device: str
    num_threads: int
    rotary: RotaryKernel
    kv_scales: Mapping[int, KVScales] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Angles of the rotary embedding.

    Attributes:
        cos, sin: [max_position, rotated elements / 2], float32 (float64 for a float64 model).
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step, for all layers.

    Rows' tokens follow each other: row r has tokens `query_starts[r]` to `query_starts[r + 1]`, and
    its j-th step token is the row's token number `num_computed[r] + j`: its block is that entry of the
    block table, its *slot* block * block_size + offset. Draft nodes come last in a row; a node's logical
    position is its depth's, which may be lower than its number.

    Attributes:
        positions: int64 [num_tokens], logical positions, for rotation and windows.
        query_starts: int64 [num_rows + 1], on the CPU.
        num_computed: int64 [num_rows], tokens of each row already in KV, on the CPU.
        block_tables: for each KV group int32 [num_rows, max_blocks]; entries past a row's length, or
            before its window, may be anything.
        ancestors: bool [num_tokens, most step tokens of a row], on draft trees: entry [t, j] says
            whether token t sees its row's j-th step token (itself included); None: each token sees
            all earlier ones of its row.
    """

    positions: torch.Tensor
    query_starts: torch.Tensor
    num_computed: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    ancestors: torch.Tensor | None = None


class AttentionBackend(ABC):
    """Attention over paged KV, on one worker."""

    @abstractmethod
    def bind(self, kv: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Takes the KV tensors, once: for each decoder layer, `TensorSpec.name` to
        [num_blocks, *TensorSpec.shape]. They are zeroed, and written by nobody else."""

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> None:
        """Takes a step's metadata, before the layers run. Valid until the next call."""

    @abstractmethod
    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: RotaryTable | None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotates q and k, writes k and v into the layer's blocks, attends.

        Attention reads k and v back as encoded, the step's own tokens included.

        Args:
            layer: decoder layer.
            q: [num_tokens, num_heads, head_dim] in the activation dtype, before rotation.
            k, v: [num_tokens, num_kv_heads, head_dim], before rotation.
            rotary: the layer's angles; None: no rotation.
            lse: float32 [num_tokens, num_heads], filled with the log of the sum of the exponentials
                of the scaled, capped scores, when given.

        Returns:
            [num_tokens, num_heads, head_dim].
        """

    @abstractmethod
    def copy_blocks(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies whole blocks of a group, data and scales, in order; int64 [num_copies] each."""

    @abstractmethod
    def move_slots(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Moves tokens' KV within a group, as the accepted path of a draft tree is compacted.

        Slots are int64 [num_moves] each. All are read before any is written.
        """
