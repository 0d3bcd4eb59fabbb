"""The parts of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pegboard.interfaces.drafter import Drafter
from pegboard.interfaces.kernel import SampleKernel
from pegboard.interfaces.logits_processor import LogitsProcessor
from pegboard.runner.draft_unit import DrafterModels
from pegboard.runner.model_unit import UnitParts


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Built parts and sizes of one worker. Nothing is loaded yet.

    Attributes:
        units: what each of its model units is made of; the target first.
        max_num_seqs: rows.
        max_model_len: most tokens a row.
        num_threads: threads that torch may use on a CPU.
        sample: the kernel that samples the target's tokens.
        processors: logits processors by name, in the order in which they act.
        drafter: guesses ahead.
        drafter_models: what the drafter uses of the worker.
        taps: hidden states that the drafter wants, all of them the target's.
        verifies_trees: whether the target's attention has a mask for trees of drafts; without one, of
            each tree the path of first children is verified.
    """

    units: tuple[UnitParts, ...]
    max_num_seqs: int
    max_model_len: int
    num_threads: int
    sample: SampleKernel
    processors: Mapping[str, LogitsProcessor]
    drafter: Drafter
    drafter_models: DrafterModels
    taps: tuple[int, ...]
    verifies_trees: bool
