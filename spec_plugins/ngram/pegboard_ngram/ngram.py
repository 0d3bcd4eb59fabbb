"""Prompt lookup: what followed the last time that the newest tokens stood together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pegboard.interfaces.drafter import DrafterContext
from pegboard.step import RowAdmission
from pegboard_ngram.hit_rates import HitRates
from pegboard_ngram.lookup import Lookup, Text
from pegboard_ngram.options import MAX_NGRAM, NgramOptions

KEY_MASK = 2**60 - 1
"""Keys of n-grams are numbers of two digits of Python's."""

_FACTOR = 0x9E3779B97F4A7C15
POWERS = [pow(_FACTOR, n, 2**64) for n in range(MAX_NGRAM)]
"""The key of an n-gram is the sum of its tokens times these, the newest token's first."""


class NgramText(Text):
    """Tokens, and for each n the place behind the latest n-gram of each kind.

    Attributes:
        num_matched: how many of the newest tokens were found; 0: too few.
        behind: the index of the token that followed them.
    """

    def __init__(self, tokens: Sequence[int], options: NgramOptions) -> None:
        self._options = options
        self._min, self._max = options.prompt_lookup_min, options.prompt_lookup_max
        self._rates = HitRates(range(self._max + 1))
        self.num_matched = self.behind = 0
        self._index(tokens[-options.max_tokens :])

    def append(self, token: int) -> None:
        if self.num_matched:
            self._rates.count(self.num_matched, self._tokens[self.behind] == token)
        if len(self._tokens) >= self._options.max_tokens:
            self._index(self._tokens[-(self._options.max_tokens // 2) :])
        self._tokens.append(token)
        self._match()

    def guess(self, most: int) -> tuple[list[int], list[float]]:
        guessed: list[int] = []
        probabilities: list[float] = []
        if not self.num_matched:
            return guessed, probabilities
        tokens, num_tokens = self._tokens, len(self._tokens)
        of_all = 1.0
        for i in range(most):
            probability = self._rates[min(self.num_matched + i, self._max)]
            of_all *= probability
            if of_all < self._options.min_confidence:
                break
            at = self.behind + i
            # Past its end the text is what was guessed: what repeats itself goes on doing so.
            guessed.append(tokens[at] if at < num_tokens else guessed[at - num_tokens])
            probabilities.append(probability)
        return guessed, probabilities

    def _index(self, tokens: Sequence[int]) -> None:
        """Begins anew with these tokens."""
        self._tokens = list(tokens)
        self._tables: list[dict[int, int]] = []
        ends = list(range(len(tokens)))  # one number for all tables
        array = np.array(tokens, np.uint64)
        keys = np.zeros(len(tokens) + 1, np.uint64)
        for n in range(1, self._max + 1):
            # Those of the n-grams from the first on: the end's first, then tokens before it.
            keys = keys[1:]
            keys = keys + array[: len(keys)] * np.uint64(POWERS[n - 1])
            if n >= self._min:
                # The last one is looked up before it is entered.
                known = (keys[:-1] & np.uint64(KEY_MASK)).tolist()
                self._tables.append(dict(zip(known, ends[n:], strict=True)))
        self._match()

    def _match(self) -> None:
        """Looks the newest n-grams up, the longest last, and enters them."""
        tokens, end = self._tokens, len(self._tokens)
        self.num_matched = self.behind = key = 0
        for n in range(1, min(self._max, end) + 1):
            key += tokens[end - n] * POWERS[n - 1]
            if n >= self._min:
                table, short = self._tables[n - self._min], key & KEY_MASK
                found = table.get(short)
                if found is not None:
                    self.num_matched, self.behind = n, found
                table[short] = end
        n = self.num_matched
        if tokens[self.behind - n : self.behind] != tokens[end - n :]:  # two of one key
            self.num_matched = 0


class Ngram(Lookup[NgramText]):
    """A drafter that looks for the newest n tokens, n from the most to the least."""

    def __init__(self, context: DrafterContext, options: NgramOptions) -> None:
        super().__init__()
        self._options = options

    def text_of(self, admission: RowAdmission) -> NgramText:
        return NgramText(admission.token_ids.tolist(), self._options)
