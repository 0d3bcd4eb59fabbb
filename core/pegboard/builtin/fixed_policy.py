"""The speculation policy that always verifies all drafts."""

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
    """Verifies every draft node that rows hold, or equally many of each where the step has less room,
    and asks for the same number again."""

    def __init__(self, context: SpeculationContext) -> None:
        self._num_nodes = context.num_speculative_tokens

    def choose(self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts) -> list[Choice]:
        num_drafting = sum(row.num_drafts > 0 for row in rows)
        # First nodes are the likeliest, so one for each of two rows is worth more than two for one.
        share = max(1, tokens_left // max(1, num_drafting))
        return [Choice(min(row.num_drafts, share), self._num_nodes) for row in rows]
