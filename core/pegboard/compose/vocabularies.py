"""Whether a drafter's model has the target's tokens. Does not import torch."""

from __future__ import annotations

import re

from pegboard.config_values import shown
from pegboard.interfaces.checkpoint import TokenizerFacts

NUM_SHOWN = 3
"""Tokens that the answer names."""

_PADDING = re.compile(r"\[PAD(\d+)\]")
"""What converters to GGUF write for a row of the embedding that no token has, with its number."""


def difference(target: TokenizerFacts, draft: TokenizerFacts) -> str:
    """In what the draft model's tokens differ from the target's; "": in nothing. Both have a tokenizer.

    Raises:
        TokenizerError: one of them cannot be read.
    """
    if (draft.file, draft.added_tokens) == (target.file, target.added_tokens):
        return ""
    own, theirs = _tokens(draft), _tokens(target)
    differing = sorted(i for i in own.keys() | theirs.keys() if own.get(i) != theirs.get(i))
    if not differing:
        return ""
    named = ", ".join(
        f"{i} is {_text(own.get(i))} for {_text(theirs.get(i))}" for i in differing[:NUM_SHOWN]
    )
    more = ", ..." if len(differing) > NUM_SHOWN else ""
    return (
        f"other tokens than the target's: {named}{more} ({len(differing)} differ); it has {len(own)}"
        f" tokens and the target {len(theirs)}"
    )


def _tokens(facts: TokenizerFacts) -> dict[int, str]:
    """The texts of tokens by id."""
    from pegboard.tokenizer import vocabulary

    def is_padding(text: str, token_id: int) -> bool:
        match = _PADDING.fullmatch(text)
        return match is not None and int(match[1]) == token_id

    return {i: text for text, i in vocabulary(facts).items() if not is_padding(text, i)}


def _text(token: str | None) -> str:
    return "no token" if token is None else shown(token)
