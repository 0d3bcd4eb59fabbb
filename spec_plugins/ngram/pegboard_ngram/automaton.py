"""A suffix automaton: all that was ever read, found in as many steps as a match has tokens.

A state stands for those of the strings that occur in the text which end at the same places; `link` leads to
the state of their longest suffix that ends at more places. Construction is Blumer's, for several texts one
after the other. It takes a constant time a token, on average.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MAX_LINKS = 32
"""States whose latest end is brought up to date with a token: the longest strings that end there. What is
beyond them, in texts that are the same token over and over, keeps an older end."""

ROOT = 0
NONE = -1
END = -1
"""Stands behind each text where the tokens of several are read."""


class SuffixAutomaton:
    """The strings of one or several texts, and where they ended last.

    Attributes:
        tokens: what was read, `END` behind each text that is over.
        length: of each state, of its longest string.
        link: of each state, the state of the longest suffix that is in another.
        latest: of each state, the index behind its latest occurrence.
        earlier: of each state, the index behind the one before that.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.length = array("i", [0])
        self.link = array("i", [NONE])
        self.latest = array("i", [0])
        self.earlier = array("i", [0])
        # Most states go on in one way only; other ways are in a mapping of their own.
        self._first_token = array("i", [NONE])
        self._first_next = array("i", [NONE])
        self._others: dict[int, dict[int, int]] = {}
        self._newest = ROOT

    @property
    def match(self) -> int:
        """The state of the longest suffix of the text that occurred in it before."""
        return max(self.link[self._newest], ROOT)

    def next(self, state: int, token: int) -> int:
        """The state of its strings with one more token; `NONE`: they never occurred."""
        if self._first_token[state] == token:
            return self._first_next[state]
        others = self._others.get(state)
        return NONE if others is None else others.get(token, NONE)

    def append(self, token: int) -> None:
        """The text has one more token."""
        before = self._newest
        self._newest = state = self._state_behind(before, token)
        self.tokens.append(token)
        length = len(self.tokens)
        for _ in range(MAX_LINKS):
            if state == ROOT:
                break
            self.earlier[state], self.latest[state] = self.latest[state], length
            state = self.link[state]

    def read(self, tokens: Sequence[int]) -> None:
        """Reads a text, and ends it."""
        for token in tokens:
            self.append(token)
        self.tokens.append(END)
        self._newest = ROOT

    def _state_behind(self, before: int, token: int) -> int:
        found = self.next(before, token)
        if found != NONE:  # another text has it
            return self._exactly(found, before, token)
        state = self._add(self.length[before] + 1)
        while before != NONE and (found := self.next(before, token)) == NONE:
            self._set_next(before, token, state)
            before = self.link[before]
        self.link[state] = ROOT if before == NONE else self._exactly(found, before, token)
        return state

    def _exactly(self, state: int, before: int, token: int) -> int:
        """The state whose longest string is that of `before` and a token; some of the strings of `state`
        are split off where these have occurred elsewhere."""
        length = self.length[before] + 1
        if self.length[state] == length:
            return state
        part = self._add(length)
        self.link[part], self.link[state] = self.link[state], part
        self.earlier[part], self.latest[part] = self.earlier[state], self.latest[state]
        self._first_token[part] = self._first_token[state]
        self._first_next[part] = self._first_next[state]
        if state in self._others:
            self._others[part] = self._others[state].copy()
        while before != NONE and self.next(before, token) == state:
            self._set_next(before, token, part)
            before = self.link[before]
        return part

    def _add(self, length: int) -> int:
        self.length.append(length)
        self.link.append(ROOT)
        self.latest.append(0)
        self.earlier.append(0)
        self._first_token.append(NONE)
        self._first_next.append(NONE)
        return len(self.length) - 1

    def _set_next(self, state: int, token: int, to: int) -> None:
        if self._first_token[state] in (NONE, token):
            self._first_token[state], self._first_next[state] = token, to
        else:
            self._others.setdefault(state, {})[token] = to
