"""A worker's parts, before and after it has started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch

from pegboard.interfaces.drafter import Drafter
from pegboard.interfaces.kernel import ProbabilitiesKernel, SampleKernel
from pegboard.interfaces.logits_processor import LogitsProcessor
from pegboard.runner.draft_unit import DrafterModels
from pegboard.runner.guarded_drafter import GuardedDrafter
from pegboard.runner.model_unit import ModelUnit, UnitParts, Units
from pegboard.runner.processor_chain import ProcessorChain
from pegboard.runner.rejection import Rejection
from pegboard.runner.rows import Rows
from pegboard.runner.sampling import Sampler
from pegboard.runner.token_choice import Exact, TokenChoice


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Built parts and sizes of one worker. Nothing is loaded yet.

    Attributes:
        units: the parts of each of its model units; the target first.
        max_num_seqs: rows.
        max_model_len: most tokens a row.
        num_threads: threads that torch may use on a CPU.
        processors: logits processors by name, in the order in which they act.
        stateful_processors: names of those whose state cannot be recomputed.
        drafter: guesses ahead.
        drafter_models: the drafter's side of the worker.
        taps: hidden states that the drafter wants, all of them the target's.
        verification: as `drafter.verification`.
        num_speculative_tokens: most draft nodes a row; 0: the drafter is never asked.
    """

    units: tuple[UnitParts, ...]
    max_num_seqs: int
    max_model_len: int
    num_threads: int
    processors: Mapping[str, LogitsProcessor]
    drafter: Drafter
    drafter_models: DrafterModels
    taps: tuple[int, ...]
    verification: Literal["exact", "rejection"] = "exact"
    num_speculative_tokens: int = 0
    stateful_processors: frozenset[str] = frozenset()


class Loaded:
    """Everything that a step runs on: weights loaded, KV allocated."""

    def __init__(self, parts: WorkerParts) -> None:
        """
        Raises:
            CheckpointError: a weight cannot be loaded.
        """
        use_threads(parts.num_threads)
        self.num_threads = parts.num_threads
        self.units = Units([ModelUnit(unit) for unit in parts.units])
        target = self.units.target
        vocab_size = target.parts.shape.vocab_size
        self.rows = Rows(
            parts.max_num_seqs,
            parts.max_model_len,
            vocab_size,
            self.units.groups,
            keeps_trees=target.parts.masks_trees,
        )
        parts.drafter_models.bind(self.units, self.rows)
        choice = _token_choice(parts)
        self.drafter = GuardedDrafter(
            parts.drafter,
            parts.drafter_models,
            parts.taps,
            self.rows,
            choice,
            is_asked=parts.num_speculative_tokens > 0,
        )
        self.processors = ProcessorChain(parts.processors, parts.stateful_processors, self.rows)
        self.sampler = Sampler(target.model, choice, self.processors, self.rows, vocab_size)


def _token_choice(parts: WorkerParts) -> TokenChoice:
    target = parts.units[0]
    sample = cast(SampleKernel, target.kernels["sample"])
    if parts.verification == "exact":
        return Exact(sample)
    probabilities = cast(ProbabilitiesKernel, target.kernels["probabilities"])
    shape = (parts.max_num_seqs, parts.num_speculative_tokens, target.shape.vocab_size)
    return Rejection(sample, probabilities, torch.zeros(shape, device=target.device))


def use_threads(num_threads: int) -> None:
    """torch's threads are the process's: each worker in it sets its own number before it computes."""
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
