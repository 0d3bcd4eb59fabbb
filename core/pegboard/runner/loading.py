"""Makes a running worker of its parts: weights loaded, KV allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pegboard.runner.guarded_drafter import GuardedDrafter
from pegboard.runner.model_unit import ModelUnit, Units
from pegboard.runner.parts import WorkerParts
from pegboard.runner.processor_chain import ProcessorChain
from pegboard.runner.rows import Rows
from pegboard.runner.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything that a step runs on."""

    num_threads: int
    units: Units
    drafter: GuardedDrafter
    rows: Rows
    processors: ProcessorChain
    sampler: Sampler


def load(parts: WorkerParts) -> Loaded:
    """Loads a worker's parts.

    Raises:
        CheckpointError: a weight cannot be loaded.
    """
    use_threads(parts.num_threads)
    units = Units([ModelUnit(unit) for unit in parts.units])
    vocab_size = units.target.parts.shape.vocab_size
    rows = Rows(
        parts.max_num_seqs,
        parts.max_model_len,
        vocab_size,
        units.groups,
        keeps_trees=parts.verifies_trees,
    )
    parts.drafter_models.bind(units, rows)
    processors = ProcessorChain(parts.processors, rows, parts.max_num_seqs)
    return Loaded(
        num_threads=parts.num_threads,
        units=units,
        drafter=GuardedDrafter(parts.drafter, parts.drafter_models, parts.taps, rows),
        rows=rows,
        processors=processors,
        sampler=Sampler(units.target.model, parts.sample, processors, rows, vocab_size),
    )


def use_threads(num_threads: int) -> None:
    """torch's threads are the process's: each worker in it sets its own number before it computes."""
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
