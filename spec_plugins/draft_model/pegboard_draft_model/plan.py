"""The needs of the drafter, for the planner. Does not import torch."""

from __future__ import annotations

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.drafter import DrafterFacts, DraftSlots
from pegboard.interfaces.model import ModelShape
from pegboard_draft_model.options import DraftModelOptions


def describe(
    facts: CheckpointFacts | None, target_shape: ModelShape, options: DraftModelOptions
) -> DrafterFacts:
    """A model of the registry. Its last guess is not computed: m of them need m - 1 slots."""
    return DrafterFacts(
        shape="registry", quantizer=options.quantizer, slots=DraftSlots(fixed=-1, a_node=1)
    )
