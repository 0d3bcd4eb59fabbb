"""The host's half of a drafter's guard: when it is asked, and when it is tried again."""

from __future__ import annotations

from pegboard.engine.breaker import Breaker
from pegboard.engine.parts import EngineParts
from pegboard.engine.step_builder import Plan
from pegboard.step import StepResult


class Drafting:
    """The breaker of a drafter. The worker cuts off one that errs, there and then, and says so; after a
    pause it is told to try it again, with the rows that are admitted from then on.

    Attributes:
        breaker: the drafter's.
        trial: how often it was tried again: see `StepBatch.drafter_trial`.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.breaker = Breaker("drafter", parts.drafter_name)
        self.trial = 0
        self._max_drafts = parts.num_speculative_tokens

    def max_drafts(self) -> int:
        """Most draft nodes a row in the next step; 0 while the drafter is cut off."""
        if not self._max_drafts:
            return 0
        return self._max_drafts if self.breaker.retry(self._try_again) else 0

    def note(self, plan: Plan, result: StepResult) -> None:
        """What came of a step. A trial ends well when a row was admitted and observed in it."""
        if result.drafter_failed:
            self.breaker.mistake(result.drafter_failed)
        elif plan.admitted:
            self.breaker.confirm()

    def _try_again(self) -> None:
        self.trial += 1
