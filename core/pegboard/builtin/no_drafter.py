"""The drafter of an engine that does not speculate."""

from __future__ import annotations

import numpy as np

from pegboard.interfaces.drafter import Drafter, DrafterContext, Observation
from pegboard.step import Drafts, Float32, Int32, RowAdmission

_NONE = np.zeros(0, np.int32)
_NOTHING = Drafts(rows=_NONE, offsets=np.zeros(1, np.int32), token_ids=_NONE, parents=_NONE)


class NoDrafter(Drafter):
    """Proposes nothing and keeps nothing."""

    def __init__(self, context: DrafterContext) -> None:
        pass

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        pass

    def release(self, row: int, num_tokens: int) -> None:
        pass

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        return _NOTHING, np.zeros(0, dtype=np.float32)
