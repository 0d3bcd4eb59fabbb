"""The audit passes what rounding explains and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pegboard.testing.parity import AuditReport, audit

PROMPT = (1, 2, 3)


def reference(ids: Sequence[int]) -> NDArray[np.float64]:
    """After token t comes t + 1, with t + 2 closely behind, by 0.01."""
    logits = np.zeros((len(ids), 300))
    for position, token in enumerate(ids):
        logits[position, token + 1] = 5.0
        logits[position, token + 2] = 4.99
    return logits


def test_the_references_own_tokens_pass() -> None:
    report = audit(reference, PROMPT, range(4, 104))
    assert report.passed and report.num_positions == 100 and report.num_near_ties == 0


def test_a_token_that_the_reference_would_not_choose_fails() -> None:
    report = audit(reference, PROMPT, [4, 5, 200, 201])
    assert not report.passed
    assert [(position, token) for position, token, _ in report.failures] == [(5, 200)]
    assert report.largest_gap == 5.0


def test_few_near_ties_pass_and_many_fail() -> None:
    once = audit(reference, PROMPT, [4, 6, *range(7, 105)])
    assert once.num_near_ties == 1 and once.passed
    often = audit(reference, PROMPT, range(5, 105, 2))
    assert often.num_near_ties == 50 and not often.failures and not often.passed


def test_reports_add_up() -> None:
    total = sum((audit(reference, PROMPT, range(4, 4 + n)) for n in (10, 20)), AuditReport())
    assert total.num_positions == 30 and total.passed
