"""Outputs that ended, for the rows of the same owner."""

from __future__ import annotations

from dataclasses import dataclass, field

from pegboard_ngram.automaton import SuffixAutomaton

Owner = tuple[str, str]
"""Tenant and cache salt."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Outputs that are forgotten together: an automaton cannot forget a part.

    Attributes:
        number: no other has it.
        outputs: what was read.
    """

    number: int
    outputs: SuffixAutomaton = field(default_factory=SuffixAutomaton)

    @property
    def num_tokens(self) -> int:
        return len(self.outputs.tokens)


class RecentOutputs:
    """At most so many tokens, those of all owners together, ends of outputs included.

    Each owner has two generations, newer and older. When the newer one has half of the tokens, it becomes
    the older one, whose place it takes. Where several owners together have too many, the one that
    brought none for the longest time loses its older generation first, then its newer one.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_generations = 0
        self._of: dict[Owner, list[Generation]] = {}  # the one that brought the newest output last

    def of(self, owner: Owner) -> list[Generation]:
        """An owner's generations, the newer one first."""
        return self._of.get(owner, [])

    def add(self, owner: Owner, tokens: list[int]) -> None:
        """An output of an owner ended."""
        half = self._max_tokens // 2
        tokens = tokens[-(half - 1) :] if half > 1 else []
        if not tokens:
            return
        generations = self._of.pop(owner, [])
        if not generations or generations[0].num_tokens + len(tokens) >= half:
            self._num_generations += 1
            generations = [Generation(self._num_generations), *generations[:1]]
        self._of[owner] = generations
        generations[0].outputs.read(tokens)
        while self._num_tokens() > self._max_tokens:
            self._forget(next(iter(self._of)))

    def forget(self) -> None:
        """All of them are forgotten."""
        self._of.clear()

    def _forget(self, owner: Owner) -> None:
        self._of[owner].pop()
        if not self._of[owner]:
            del self._of[owner]

    def _num_tokens(self) -> int:
        return sum(one.num_tokens for generations in self._of.values() for one in generations)
