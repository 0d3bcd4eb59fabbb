"""Makes a running worker of its parts: weights loaded, KV allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from pegboard.interfaces.attention import AttentionBackend
from pegboard.interfaces.kernel import SampleKernel
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.model import Model
from pegboard.models.layers import LayerBuilder
from pegboard.runner import kv_tensors
from pegboard.runner.guarded_drafter import GuardedDrafter
from pegboard.runner.parts import WorkerParts
from pegboard.runner.processor_chain import ProcessorChain
from pegboard.runner.rows import Rows
from pegboard.runner.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything that a step runs on."""

    device: torch.device
    num_threads: int
    groups: tuple[KVGroup, ...]
    attention: AttentionBackend
    taps: range
    drafter: GuardedDrafter
    model: Model
    kv: Sequence[kv_tensors.LayerKV]
    rows: Rows
    processors: ProcessorChain
    sampler: Sampler


def load(parts: WorkerParts) -> Loaded:
    """Loads a worker's parts.

    Raises:
        CheckpointError: a weight cannot be loaded.
    """
    use_threads(parts.num_threads)
    device = torch.device(parts.device)
    model = parts.build_model(layer_builder(parts))
    kv = kv_tensors.allocate(parts.groups, parts.num_blocks, parts.layouts, device)
    parts.attention.bind(kv)
    rows = Rows(
        parts.max_num_seqs,
        parts.max_model_len,
        parts.shape.vocab_size,
        parts.groups,
        keeps_trees=parts.verifies_trees,
    )
    processors = ProcessorChain(parts.processors, rows, parts.max_num_seqs)
    sample = cast(SampleKernel, parts.kernels["sample"])
    return Loaded(
        device=device,
        num_threads=parts.num_threads,
        groups=parts.groups,
        attention=parts.attention,
        taps=parts.shape.taps,
        drafter=GuardedDrafter(parts.drafter, parts.taps, rows),
        model=model,
        kv=kv,
        rows=rows,
        processors=processors,
        sampler=Sampler(model, sample, processors, rows, parts.shape.vocab_size),
    )


def use_threads(num_threads: int) -> None:
    """torch's threads are the process's: each worker in it sets its own number before it computes."""
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def layer_builder(parts: WorkerParts) -> LayerBuilder:
    """What the model's factory gets."""
    return LayerBuilder(
        shape=parts.shape,
        source=parts.source,
        quantizer=parts.quantizer,
        linear_kernels=parts.linear_kernels,
        kernels=parts.kernels,
        attention=parts.attention,
        dtype=parts.dtype,
        device=parts.device,
        on_tensor=parts.on_tensor,
        max_positions=parts.max_model_len,
    )
