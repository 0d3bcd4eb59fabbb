"""The speculation policy that always verifies what there is."""

from __future__ import annotations

from pegboard.interfaces.speculation_policy import (
    DraftView,
    SpeculationContext,
    SpeculationPolicy,
)


class FixedPolicy(SpeculationPolicy):
    """Verifies every draft node that a row holds and asks for the same number again."""

    def __init__(self, context: SpeculationContext) -> None:
        self._num_nodes = context.num_speculative_tokens

    def verify(self, row: DraftView) -> int:
        return row.num_drafts

    def propose(self, row: DraftView) -> int:
        return self._num_nodes
