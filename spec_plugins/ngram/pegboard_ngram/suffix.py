"""What followed the longest match: of the newest tokens of a row, in its text and in recent outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pegboard.interfaces.drafter import DrafterContext
from pegboard.step import RowAdmission
from pegboard_ngram.automaton import END, NONE, ROOT, SuffixAutomaton
from pegboard_ngram.hit_rates import HitRates
from pegboard_ngram.lookup import Lookup, Text
from pegboard_ngram.options import SuffixOptions
from pegboard_ngram.recent import Generation, Owner, RecentOutputs

MAX_MATCH = 64
"""Newest tokens that are looked for in outputs that came since the last token."""

_NUM_KINDS = MAX_MATCH.bit_length() + 1
_LENGTHS = [2**kind // 2 for kind in range(_NUM_KINDS)]
"""Match lengths are told apart by their number of binary digits."""


def _kind(match_length: int) -> int:
    return min(match_length.bit_length(), _NUM_KINDS - 1)


@dataclass(slots=True)
class Cursor:
    """The longest suffix of a row that is in recent outputs.

    Attributes:
        state: whose strings end with it.
        num_matched: its tokens.
        num_read: tokens of the outputs when it was found.
    """

    state: int = ROOT
    num_matched: int = 0
    num_read: int = 0

    def follow(self, outputs: SuffixAutomaton, tokens: Sequence[int]) -> None:
        """The row has one more token, the last one. All of the suffix is looked for again where outputs
        came since."""
        if self.num_read == len(outputs.tokens):
            self._step(outputs, tokens[-1])
            return
        self.state, self.num_matched, self.num_read = ROOT, 0, len(outputs.tokens)
        for token in tokens[-MAX_MATCH:]:
            self._step(outputs, token)

    def _step(self, outputs: SuffixAutomaton, token: int) -> None:
        state = self.state
        while (found := outputs.next(state, token)) == NONE and state != ROOT:
            state = outputs.link[state]
            self.num_matched = outputs.length[state]
        self.state = max(found, ROOT)
        self.num_matched += found != NONE


class Match(NamedTuple):
    """A place where the newest tokens stood before.

    Attributes:
        num_matched: so many of them.
        tokens: of the text that they stood in.
        behind: the index of the token that followed them.
        rates: how often guesses from that kind of text are right.
        goes_on: whether the text is the row's own, and what is guessed will follow its last token.
    """

    num_matched: int
    tokens: list[int]
    behind: int
    rates: HitRates
    goes_on: bool


class SuffixText(Text):
    """Tokens, and the longest match of the newest ones.

    Attributes:
        owner: whose outputs it sees.
        keeps: whether its output may be kept.
        match: the longest; of those as long as each other the row's own, then one in newer outputs.
            None: too few tokens.
    """

    def __init__(
        self, tokens: Sequence[int], options: SuffixOptions, recent: RecentOutputs, owner: Owner
    ) -> None:
        """
        Args:
            recent: the outputs that ended.
            owner: whose of them it may see.
        """
        self.owner, self.keeps = owner, True
        self._num_known, self._output = len(tokens), list[int]()
        self.match: Match | None = None
        self._options, self._recent = options, recent
        self._own_rates, self._recent_rates = HitRates(_LENGTHS), HitRates(_LENGTHS)
        self._cursors: dict[int, Cursor] = {}
        self._index(tokens[-options.max_tokens :])
        self._find()

    def append(self, token: int) -> None:
        match = self.match
        if match is not None:
            match.rates.count(_kind(match.num_matched), match.tokens[match.behind] == token)
        if len(self._own.tokens) >= self._options.max_tokens:
            self._index(self._own.tokens[-(self._options.max_tokens // 2) :])
        self._own.append(token)
        if self._options.recent_tokens:
            self._output.append(token)
        self._find()

    def guess(self, most: int) -> tuple[list[int], list[float]]:
        guessed: list[int] = []
        probabilities: list[float] = []
        match = self.match
        if match is None:
            return guessed, probabilities
        of_all = 1.0
        for i in range(most):
            probability = match.rates[_kind(match.num_matched + i)]
            of_all *= probability
            at = match.behind + i
            if at < len(match.tokens):
                token = match.tokens[at]
            else:
                token = guessed[at - len(match.tokens)] if match.goes_on else END
            if token == END or of_all < self._options.min_confidence:
                break
            guessed.append(token)
            probabilities.append(probability)
        return guessed, probabilities

    def output(self, num_tokens: int) -> list[int]:
        """What was appended, of a row that has so many tokens in the end. What it had before a preemption
        was given back with that."""
        return self._output[: max(0, num_tokens - self._num_known)]

    def _index(self, tokens: Sequence[int]) -> None:
        """Begins the row's own text anew."""
        self._own = SuffixAutomaton()
        for token in tokens:
            self._own.append(token)

    def _find(self) -> None:
        own, state = self._own, self._own.match
        longest = own.length[state]
        self.match = None
        if longest >= self._options.min_match:
            self.match = Match(longest, own.tokens, own.earlier[state], self._own_rates, True)
        generations = self._recent.of(self.owner)
        if not generations:
            return
        self._cursors = {one.number: self._cursors.get(one.number, Cursor()) for one in generations}
        for one in generations:
            found = self._found_in(one)
            if found is not None and found.num_matched > longest:
                self.match, longest = found, found.num_matched

    def _found_in(self, generation: Generation) -> Match | None:
        """The longest match in outputs, where a token follows it."""
        outputs, cursor = generation.outputs, self._cursors[generation.number]
        cursor.follow(outputs, self._own.tokens)
        if cursor.num_matched < self._options.min_match:
            return None
        for behind in (outputs.latest[cursor.state], outputs.earlier[cursor.state]):
            if behind and outputs.tokens[behind] != END:
                return Match(cursor.num_matched, outputs.tokens, behind, self._recent_rates, False)
        return None


class Suffix(Lookup[SuffixText]):
    """A drafter that looks for the longest match, in the row's text and in outputs that ended."""

    def __init__(self, context: DrafterContext, options: SuffixOptions) -> None:
        super().__init__()
        self._options = options
        self._recent = RecentOutputs(options.recent_tokens)

    def text_of(self, admission: RowAdmission) -> SuffixText:
        owner = (admission.tenant, admission.salt)
        text = SuffixText(admission.token_ids.tolist(), self._options, self._recent, owner)
        text.keeps = admission.keeps
        return text

    def release(self, row: int, num_tokens: int) -> None:
        text = self._texts.pop(row)
        if text.keeps:
            self._recent.add(text.owner, text.output(num_tokens))

    def forget(self) -> None:
        self._recent.forget()
        for text in self._texts.values():
            text.keeps = False
