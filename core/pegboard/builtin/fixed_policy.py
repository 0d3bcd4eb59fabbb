"""The speculation policy that always verifies what there is."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.interfaces.speculation_policy import (
    Choice,
    DraftView,
    SpeculationContext,
    SpeculationPolicy,
    StepCosts,
)


class FixedPolicy(SpeculationPolicy):
    """Verifies every draft node that a row holds and asks for the same number again."""

    def __init__(self, context: SpeculationContext) -> None:
        self._num_nodes = context.num_speculative_tokens

    def choose(self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts) -> list[Choice]:
        return [Choice(row.num_drafts, self._num_nodes) for row in rows]
