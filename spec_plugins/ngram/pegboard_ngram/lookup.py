"""What the drafters share: texts by row, and chains as arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import numpy as np

from pegboard.interfaces.drafter import Drafter, Observation
from pegboard.step import Drafts, Float32, Int32, RowAdmission


class Text(ABC):
    """The tokens of one row, searchable."""

    @abstractmethod
    def append(self, token: int) -> None:
        """The row has one more token."""

    @abstractmethod
    def guess(self, most: int) -> tuple[list[int], list[float]]:
        """At most so many tokens that may follow, and the probability of each, given that those before
        it are right."""


OneText = TypeVar("OneText", bound=Text)


class Lookup(Drafter, Generic[OneText]):
    """Drafts one chain a row, from the row's text."""

    def __init__(self) -> None:
        self._texts: dict[int, OneText] = {}

    @abstractmethod
    def text_of(self, admission: RowAdmission) -> OneText:
        """The text of a row that is taken."""

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self._texts[admission.row] = self.text_of(admission)

    def release(self, row: int, num_tokens: int) -> None:
        del self._texts[row]

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        new, ends = seen.next_token_ids.tolist(), seen.next_offsets.tolist()
        rows: list[int] = []
        offsets = [0]
        token_ids: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        asked = zip(seen.rows.tolist(), seen.propose.tolist(), strict=True)
        for i, (row, most) in enumerate(asked):
            text = self._texts[row]
            for token in new[ends[i] : ends[i + 1]]:
                text.append(token)
            guessed, theirs = text.guess(most) if most else ((), ())
            if guessed:
                rows.append(row)
                token_ids += guessed
                parents += range(-1, len(guessed) - 1)
                probabilities += theirs
                offsets.append(len(token_ids))
        drafts = Drafts(
            rows=np.array(rows, np.int32),
            offsets=np.array(offsets, np.int32),
            token_ids=np.array(token_ids, np.int32),
            parents=np.array(parents, np.int32),
        )
        return drafts, np.array(probabilities, np.float32)
