"""Stop texts, found as text arrives."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pegboard.engine.parts import Detokenizer


class TextStream:
    """One sequence's search for stop texts, and the text that may be shown.

    Text that could still become the beginning of a stop text is held back, so that shown text never
    has to be taken back.

    Attributes:
        stopped_by: the stop text that was found; None until then.
    """

    def __init__(self, detokenizer: Detokenizer | None, stop: Sequence[StopText]) -> None:
        self.stopped_by: str | None = None
        self._detokenizer = detokenizer
        self._searches = tuple(map(_Search, stop))
        self._held = ""

    def add(self, token_id: int, may_stop: bool = True) -> str:
        """New text that may be shown.

        Args:
            token_id: the next token.
            may_stop: whether a stop text that is complete with this token ends the sequence.
        """
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.add((token_id,))
        return self._scan(text, may_stop) if self._searches else text

    def finish(self, may_stop: bool = True) -> str:
        """The rest, at the end of a sequence that no stop text ended."""
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        text = self._detokenizer.finish()
        if not self._searches:
            return text
        shown = self._scan(text, may_stop)
        if self.stopped_by is None:
            shown, self._held = shown + self._held, ""
        return shown

    def _scan(self, text: str, may_stop: bool) -> str:
        """Reads on character by character, so that the cut into pieces does not matter. The stop text that
        is complete first counts, and of several the longest."""
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            found = [search.text for search in self._searches if search.read(buffer[end - 1])]
            if found and may_stop:
                self.stopped_by = max(found, key=len)
                self._held = ""
                return buffer[: end - len(self.stopped_by)]
        num_held = max(search.num_matched for search in self._searches)
        split = len(buffer) - num_held
        self._held = buffer[split:]
        return buffer[:split]


class StopText:
    """A stop text and its failure function (Knuth, Morris and Pratt), shared by all sequences of a request.

    The function is computed no further than some sequence has matched, so that a long text costs no
    more than the answers that are compared with it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._fallback = array("I", (0,))

    def fallback(self, num_matched: int) -> int:
        """Characters that stay matched if the one after the first `num_matched` differs."""
        known, text = self._fallback, self.text
        while len(known) < num_matched:
            character, matched = text[len(known)], known[-1]
            while matched and character != text[matched]:
                matched = known[matched - 1]
            known.append(matched + (character == text[matched]))
        return known[num_matched - 1]


def stop_texts(texts: Sequence[str], max_length: int | None) -> tuple[StopText, ...]:
    """The stop texts that an answer can hold, each once.

    Args:
        max_length: most characters of an answer; None: unknown.
    """
    return tuple(
        StopText(text)
        for text in dict.fromkeys(texts)
        if max_length is None or len(text) <= max_length
    )


class _Search:
    """One sequence's search for a stop text: `num_matched` is the longest end of what was read that
    begins it."""

    __slots__ = ("_stop", "num_matched", "text")

    def __init__(self, stop: StopText) -> None:
        self._stop = stop
        self.text = stop.text
        self.num_matched = 0

    def read(self, character: str) -> bool:
        """Whether the text is complete with this character."""
        matched = self.num_matched
        while matched and character != self.text[matched]:
            matched = self._stop.fallback(matched)
        matched += character == self.text[matched]
        is_complete = matched == len(self.text)
        # After a complete match the search goes on: its end may begin the next one.
        self.num_matched = self._stop.fallback(matched) if is_complete else matched
        return is_complete
