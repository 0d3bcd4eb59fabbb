"""What a worker is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.interfaces.attention import AttentionBackend
from pegboard.interfaces.checkpoint import CheckpointSource
from pegboard.interfaces.drafter import Drafter
from pegboard.interfaces.kernel import Kernel, LinearKernel
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.logits_processor import LogitsProcessor
from pegboard.interfaces.model import Model, ModelShape
from pegboard.interfaces.quantizer import Quantizer

if TYPE_CHECKING:
    from pegboard.models.layers import LayerBuilder


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Built parts and sizes of one worker. Nothing is loaded yet.

    Attributes:
        shape: the model.
        groups: KV groups.
        num_blocks: of each group, block 0 included.
        layouts: for each group, the tensors of a block of one layer.
        max_num_seqs: rows.
        max_num_batched_tokens: most tokens a step, draft nodes not counted.
        max_model_len: most tokens a row.
        dtype: activation dtype.
        device: `cpu`, `cuda` or `cuda:0`.
        num_threads: threads that torch may use on a CPU.
        kernels: operation to kernel, all but `linear`.
        linear_kernels: weight format to its kernel.
        attention: the attention backend.
        source: the open checkpoint.
        quantizer: how linear weights are stored.
        build_model: the model's factory.
        processors: logits processors by name, in the order in which they act.
        drafter: guesses ahead.
        taps: decoder layers whose input hidden states the drafter wants, all of them the model's.
        verifies_trees: whether attention has a mask for trees of drafts; without one, of each tree
            the path of first children is verified.
        on_tensor: told the name of each tensor that was loaded.
    """

    shape: ModelShape
    groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]
    layouts: tuple[tuple[TensorSpec, ...], ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    dtype: str
    device: str
    num_threads: int
    kernels: Mapping[str, Kernel]
    linear_kernels: Mapping[str, LinearKernel]
    attention: AttentionBackend
    source: CheckpointSource
    quantizer: Quantizer
    build_model: Callable[[LayerBuilder], Model]
    processors: Mapping[str, LogitsProcessor]
    drafter: Drafter
    taps: tuple[int, ...]
    verifies_trees: bool
    on_tensor: Callable[[str], None]
