"""The audit: is each token that an engine chose the one that another implementation would choose?

Two implementations round differently, so equal texts cannot be asked for: one near tie, and the texts
part for good. The audit asks a reference for the logits of every position of *our* text instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

EPSILON = {"float64": 1e-6, "float32": 0.02, "bfloat16": 0.5, "float16": 0.1}
"""Gap in logits that rounding may make, by the dtype of the engine under audit."""

MAX_NEAR_TIES = 0.02
"""Most positions, as a fraction, that may need the epsilon."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The findings of an audit; reports of several texts are added up.

    Attributes:
        num_positions: tokens audited.
        num_near_ties: tokens that are not the reference's argmax, and whose gap is under epsilon.
        failures: (position in the text, token, gap) of each token whose gap is not.
        largest_gap: over all positions, in logits.
    """

    num_positions: int = 0
    num_near_ties: int = 0
    failures: tuple[tuple[int, int, float], ...] = ()
    largest_gap: float = 0.0

    @property
    def passed(self) -> bool:
        """No failure, and at most 2 percent near ties."""
        return not self.failures and self.num_near_ties <= MAX_NEAR_TIES * self.num_positions

    def __add__(self, other: AuditReport) -> AuditReport:
        return AuditReport(
            self.num_positions + other.num_positions,
            self.num_near_ties + other.num_near_ties,
            self.failures + other.failures,
            max(self.largest_gap, other.largest_gap),
        )


def audit(
    reference_logits_fn: Callable[[Sequence[int]], Any],
    prompt: Sequence[int],
    tokens: Sequence[int],
    epsilon: float = EPSILON["float32"],
) -> AuditReport:
    """Audits the greedy tokens of one prompt by one teacher-forced forward of a reference.

    Args:
        reference_logits_fn: token ids -> logits of each position, array-like [len(ids), vocab_size].
        prompt: token ids, at least one.
        tokens: that the engine under audit generated from it at temperature 0.
        epsilon: gap that is put down to rounding.
    """
    ids = [*prompt, *tokens]
    logits = np.asarray(reference_logits_fn(ids), dtype=np.float64)
    assert logits.shape[0] == len(ids), "the reference gives logits for each position"
    predicting = logits[len(prompt) - 1 : len(ids) - 1]
    gaps = predicting.max(axis=1) - predicting[np.arange(len(tokens)), list(tokens)]
    return AuditReport(
        num_positions=len(tokens),
        num_near_ties=int(((gaps > 0.0) & (gaps < epsilon)).sum()),
        failures=tuple(
            (len(prompt) + i, token, float(gap))
            for i, (token, gap) in enumerate(zip(tokens, gaps, strict=True))
            if gap >= epsilon
        ),
        largest_gap=float(gaps.max(initial=0.0)),
    )
