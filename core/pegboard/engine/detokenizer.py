"""Text of a growing sequence of tokens, piece by piece."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from pegboard.engine.parts import Detokenizer

REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no character, or not yet

# Tokens that are decoded again before new ones. A character has four bytes at most, so after four tokens
# a decoder's state does not depend on the window's beginning. Decoders also drop a leading space of a
# text; here they drop it from a token whose text is out already.
CONTEXT = 4


class Decoder(Protocol):
    """Turns ids into text."""

    def decode(self, token_ids: Sequence[int], /) -> str: ...


@runtime_checkable
class TokenKinds(Protocol):
    """Optional methods of a decoder: kinds of its tokens."""

    def is_skipped(self, token_id: int, /) -> bool:
        """Whether `decode` leaves the token out."""

    def is_byte(self, token_id: int, /) -> bool:
        """Whether it is a byte of a run that decodes as a whole: to characters if all of the run is
        UTF-8, else to one U+FFFD for each byte."""


@runtime_checkable
class TokenBytes(Protocol):
    """Optional methods of a decoder whose tokens mean the same beside any others."""

    @property
    def joins_bytes(self) -> bool:
        """Whether `decode` is the UTF-8 of the tokens' bytes, skipped tokens left out."""

    def is_skipped(self, token_id: int, /) -> bool: ...

    def token_bytes(self, token_id: int, /) -> bytes:
        """A token's bytes."""


def detokenizers(decoder: Decoder) -> Callable[[], Detokenizer]:
    """Makes a detokenizer for each sequence: the fastest that is right for the decoder."""
    if isinstance(decoder, TokenBytes) and decoder.joins_bytes:
        pieces = _Pieces(decoder)
        return lambda: ByteDetokenizer(pieces)
    return lambda: IncrementalDetokenizer(decoder)


class _Pieces(dict[int, tuple[bytes, str | None]]):
    """Bytes of the tokens met so far, and their texts if the bytes are UTF-8 by themselves."""

    def __init__(self, decoder: TokenBytes) -> None:
        self._decoder = decoder

    def __missing__(self, token_id: int) -> tuple[bytes, str | None]:
        skipped = self._decoder.is_skipped(token_id)
        piece = b"" if skipped else self._decoder.token_bytes(token_id)
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = piece, text
        return piece, text


class ByteDetokenizer:
    """One sequence's text, if it is the UTF-8 of its tokens' bytes: no token is decoded twice.

    Only the beginning of a character is held back.

    Args:
        pieces: each token's bytes and text; may be shared.
    """

    def __init__(self, pieces: Mapping[int, tuple[bytes, str | None]]) -> None:
        self._pieces = pieces
        self._characters = getincrementaldecoder("utf-8")(errors="replace")
        self._holds_back = False

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns new text that no later token changes."""
        shown = ""
        for token_id in token_ids:
            piece, text = self._pieces[token_id]
            if text is None or self._holds_back:
                text = self._characters.decode(piece)
                self._holds_back = bool(self._characters.getstate()[0])
            shown += text
        return shown

    def finish(self) -> str:
        """The rest, as no token follows. Nothing may be added afterwards."""
        return self._characters.decode(b"", final=True)


class IncrementalDetokenizer:
    """One sequence's text. All that `add` and `finish` return, joined, is `decode` of all tokens.

    Each `add` decodes a window of few tokens, however long the sequence is. Only text that later tokens
    may change is held back: the beginning of a character, and a run of byte tokens.

    Args:
        decoder: `decode(ids) -> text`. It may offer `TokenKinds`; one with skipped or byte tokens
            must.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._kinds = decoder if isinstance(decoder, TokenKinds) else None
        self._context: list[int] = []
        self._pending: list[int] = []
        self._num_emitted = 0  # characters of the context's text

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns new text that no later token changes."""
        kinds = self._kinds
        if kinds is None:
            self._pending += token_ids
        else:
            self._pending += [item for item in token_ids if not kinds.is_skipped(item)]
            if self._pending and kinds.is_byte(self._pending[-1]):
                return ""
        if not self._pending:
            return ""
        window = self._context + self._pending
        text = _decided(self._decoder.decode(window))
        new = text[self._num_emitted :]
        self._move_on(window, text)
        return new

    def finish(self) -> str:
        """The rest, as no token follows. Nothing may be added afterwards."""
        window = self._context + self._pending
        return self._decoder.decode(window)[self._num_emitted :]

    def _move_on(self, window: list[int], text: str) -> None:
        """Makes the end of the window the context of the next tokens."""
        self._pending = []
        self._context, self._num_emitted = window, len(text)
        if len(window) > 2 * CONTEXT:
            context = window[-CONTEXT:]
            if context_text := _decided(self._decoder.decode(context)):
                self._context, self._num_emitted = context, len(context_text)


def _decided(text: str) -> str:
    """The text without a last U+FFFD: the other bytes of that character may still come."""
    return text.removesuffix(REPLACEMENT)
