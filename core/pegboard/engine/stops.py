"""Stop texts, found as text arrives."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.engine.parts import Detokenizer


class TextStream:
    """One sequence's text: what may be shown, and the stop text that ended it.

    Text that could still become the beginning of a stop text is held back, so that shown text never
    has to be taken back.

    Attributes:
        stopped_by: the stop text that was found; None until then.
    """

    def __init__(self, detokenizer: Detokenizer | None, stop: Sequence[str]) -> None:
        self.stopped_by: str | None = None
        self._detokenizer = detokenizer
        self._patterns = tuple(_Pattern(text) for text in stop)
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
        return self._scan(text, may_stop) if self._patterns else text

    def finish(self, may_stop: bool = True) -> str:
        """The rest, at the end of a sequence that no stop text ended."""
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        text = self._detokenizer.finish()
        if not self._patterns:
            return text
        shown = self._scan(text, may_stop)
        if self.stopped_by is None:
            shown, self._held = shown + self._held, ""
        return shown

    def _scan(self, text: str, may_stop: bool) -> str:
        """Reads on character by character, so that pieces do not matter: the stop text that is
        complete first counts, and of several the longest."""
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            found = [pattern for pattern in self._patterns if pattern.read(buffer[end - 1])]
            if found and may_stop:
                self.stopped_by = max((pattern.text for pattern in found), key=len)
                self._held = ""
                return buffer[: end - len(self.stopped_by)]
        num_held = max(pattern.num_matched for pattern in self._patterns)
        split = len(buffer) - num_held
        self._held = buffer[split:]
        return buffer[:split]


class _Pattern:
    """Knuth-Morris-Pratt: `num_matched` is the longest end of what was read that begins `text`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = [0] * len(text)
        matched = 0
        for index in range(1, len(text)):
            while matched and text[index] != text[matched]:
                matched = self._fallback[matched - 1]
            matched += text[index] == text[matched]
            self._fallback[index] = matched

    def read(self, character: str) -> bool:
        """Whether the text is complete with this character."""
        matched = self.num_matched
        while matched and character != self.text[matched]:
            matched = self._fallback[matched - 1]
        matched += character == self.text[matched]
        is_complete = matched == len(self.text)
        # What is complete is looked for anew; its end may be the beginning of the next.
        self.num_matched = self._fallback[-1] if is_complete else matched
        return is_complete
