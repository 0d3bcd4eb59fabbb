"""The token at each logit row of a step, drafts or none.

`verification.accept` keeps a draft node while it equals the token at the logit row before it. So
everything by which one verification differs from another is here: how drafts are asked for, and how
that token is chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from pegboard.interfaces.drafter import Drafter, Observation
from pegboard.interfaces.kernel import SampleKernel, SampleRows
from pegboard.runner.drafting import checked
from pegboard.runner.drafts import DraftTable
from pegboard.runner.inputs import StepInputs
from pegboard.step import Int64


class TokenChoice(ABC):
    """A way to verify, chosen when the worker is built."""

    @abstractmethod
    def propose(self, drafter: Drafter, seen: Observation, table: DraftTable) -> None:
        """Asks a drafter for the nodes of the next step, and puts them into the table.

        Raises:
            EngineError: the answer cannot be used; nothing of it is in the table.
        """

    @abstractmethod
    def draw(self, logits: torch.Tensor, rows: SampleRows, inputs: StepInputs) -> Int64:
        """The token at each logit row, int64 [L].

        Args:
            logits: float32 [L, vocab_size], processed.
            rows: of these logit rows.
            inputs: the step.
        """


class Exact(TokenChoice):
    """The target's own token everywhere, as if there were no drafts."""

    def __init__(self, sample: SampleKernel) -> None:
        self._sample = sample

    def propose(self, drafter: Drafter, seen: Observation, table: DraftTable) -> None:
        drafts, confidences = checked(drafter.propose(seen), seen)
        if len(drafts.rows):
            table.put(drafts, confidences)

    def draw(self, logits: torch.Tensor, rows: SampleRows, inputs: StepInputs) -> Int64:
        return self._sample.sample(logits, rows).cpu().numpy()
