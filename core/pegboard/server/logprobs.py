"""Logprobs in the two shapes that the API has for them."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.request import TokenLogprob
from pegboard.server.replies import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from pegboard.server.served_model import TokenTexts

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def completion_logprobs(
    entries: Sequence[TokenLogprob], texts: TokenTexts, num_top: int, offset: int
) -> CompletionLogprobs:
    """
    Args:
        entries: one a token.
        texts: of tokens.
        num_top: most likely tokens that were asked for.
        offset: characters of the choice that came before.
    """
    tokens = [texts.text(entry.token_id) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(entry.logprob) for entry in entries],
        top_logprobs=[_top(entry, texts) for entry in entries] if num_top else None,
        text_offset=offsets,
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


def _top(entry: TokenLogprob, texts: TokenTexts) -> dict[str, float]:
    # By text, as the API wants it: of two tokens that look the same, the likelier one stays. The
    # chosen token is always there.
    top: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        top.setdefault(texts.text(token_id), _finite(logprob))
    top.setdefault(texts.text(entry.token_id), _finite(entry.logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
