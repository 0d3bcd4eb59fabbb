"""Logprobs in the shapes that the API has for them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from pegboard.request import SequenceDelta, TokenLogprob
from pegboard.server.call import Call
from pegboard.server.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from pegboard.server.served_model import TokenTexts

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class ChoiceLogprobs:
    """The logprobs of one completion's choice, as its text comes: they say where each token begins.

    Args:
        texts: of tokens.
        num_top: most likely tokens that were asked for.
    """

    def __init__(self, texts: TokenTexts, num_top: int) -> None:
        self._texts = texts
        self._num_top = num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(
        self, text: str, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> CompletionLogprobs:
        """Logprobs of an echoed prompt; called before `answer`.

        Args:
            text: the prompt's.
            token_ids: the prompt's.
            entries: one a token.
        """
        offsets = []
        for token_id in token_ids:
            offsets.append(min(self._begin(token_id), len(text)))
            # A prompt may begin with a token that its text does not show.
            if self._texts.is_shown(token_id) or text.startswith(
                self._texts.text(token_id), self._offset
            ):
                self._advance(token_id)
        # A normalizer may have made tokens of another text than the one that is shown.
        self._offset = len(text)
        self._decoder.reset()
        return self._columns(token_ids, entries, offsets)

    def answer(self, entries: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """Logprobs of the next tokens."""
        token_ids = [entry.token_id for entry in entries]
        offsets = []
        for token_id in token_ids:
            offsets.append(self._begin(token_id))
            if self._texts.is_shown(token_id):
                self._advance(token_id)
        return self._columns(token_ids, entries, offsets)

    def _begin(self, token_id: int) -> int:
        """The offset at which the token begins. A character that it does not continue ends here."""
        raw = self._texts.raw(token_id)
        if raw and raw[0] & 0xC0 != 0x80:
            self._offset += len(self._decoder.decode(b"", final=True))
        return self._offset

    def _advance(self, token_id: int) -> None:
        self._offset += len(self._decoder.decode(self._texts.raw(token_id)))

    def _columns(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprob | None],
        offsets: list[int],
    ) -> CompletionLogprobs:
        texts = self._texts
        top = [None if entry is None else _top(entry, texts, self._num_top) for entry in entries]
        return CompletionLogprobs(
            tokens=[texts.text(token_id) for token_id in token_ids],
            token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in entries],
            top_logprobs=top if self._num_top else None,
            text_offset=offsets,
        )


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs | None:
    """Logprobs that follow each other, as one; None of none."""
    if not parts:
        return None
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[value for part in parts for value in part.token_logprobs],
        top_logprobs=[top for part in tops for top in part] if tops else None,
        text_offset=[offset for part in parts for offset in part.text_offset],
    )


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts) -> ChatLogprobs:
    """One entry a token, each with the most likely tokens that were asked for."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                texts.text(entry.token_id),
                _finite(entry.logprob),
                texts.bytes(entry.token_id),
                [
                    TopLogprob(texts.text(token_id), _finite(logprob), texts.bytes(token_id))
                    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
                ],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(
    call: Call, answer: SequenceDelta, texts: TokenTexts
) -> PromptLogprobs | UnsetType:
    """One entry a prompt token: the most likely tokens there, and the token itself. UNSET: not asked
    for."""
    if (num_top := call.num_prompt_logprobs) is None:
        return UNSET
    entries = answer.prompt_logprobs or ()
    return [None if entry is None else _prompt_entry(entry, num_top, texts) for entry in entries]


def _prompt_entry(entry: TokenLogprob, num_top: int, texts: TokenTexts) -> dict[str, PromptLogprob]:
    ranked = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
    known = {
        str(token_id): PromptLogprob(_finite(logprob), rank, texts.text(token_id))
        for rank, (token_id, logprob) in enumerate(ranked, start=1)
    }
    itself = PromptLogprob(_finite(entry.logprob), entry.rank, texts.text(entry.token_id))
    return {str(entry.token_id): itself, **known}


def _top(entry: TokenLogprob, texts: TokenTexts, num_top: int) -> dict[str, float]:
    # By text, as the API wants it: of two tokens that look the same, the likelier one stays. The
    # chosen token is always there.
    top: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False):
        top.setdefault(texts.text(token_id), _finite(logprob))
    top.setdefault(texts.text(entry.token_id), _finite(entry.logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
