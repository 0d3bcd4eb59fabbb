"""The part of `pegboard check` about texts: their ends, sampling defaults, chat template."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from pegboard.compose import Prepared, load_tokenizer
from pegboard.config_values import shown

if TYPE_CHECKING:
    from pegboard.tokenizer import Tokenizer


def text_report(prepared: Prepared) -> dict[str, Any]:
    """The findings, as plain values.

    Raises:
        TokenizerError: the tokenizer or the chat template cannot be used.
    """
    tokenizer = load_tokenizer(prepared)
    facts = prepared.composition.target.facts
    defaults = prepared.sampling_defaults
    return {
        "ends": [
            {
                "id": token_id,
                "token": None if tokenizer is None else tokenizer.token(token_id),
                "from": [name for name, ids in facts.eos_sources.items() if token_id in ids],
            }
            for token_id in facts.eos_token_ids
        ],
        "sampling": dict(defaults.values),
        "not_followed": list(defaults.not_followed),
        "chat": None if tokenizer is None else _chat(tokenizer),
    }


def _chat(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The use of the chat template; None: there is none."""
    if tokenizer.chat is None:
        return None
    with contextlib.closing(tokenizer):
        return {"reads_parts": list(tokenizer.chat.check())}


def text_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The same as lines."""
    for label, end in zip(chain(["ends with"], repeat("")), found["ends"], strict=False):
        token = "" if not end["token"] else f" {shown(end['token'])}"
        whence = ", ".join(end["from"]) or "the checkpoint"
        yield f"{label:<14} {end['id']}{token}  ({whence})"
    if not found["ends"]:
        yield "ends with      max_tokens: no token is known that ends a text"
    if found["sampling"]:
        values = ", ".join(f"{name}={value}" for name, value in found["sampling"].items())
        yield f"sampling       {values}  (the checkpoint's, where a request says nothing)"
    if found["not_followed"]:
        values = ", ".join(found["not_followed"])
        yield f"not followed   {values}  (the checkpoint's generation config)"
    yield f"chats          {_chat_line(found['chat'])}"


def _chat_line(chat: Mapping[str, Any] | None) -> str:
    if chat is None:
        return "none: there is no chat template"
    if chat["reads_parts"]:
        return f"by its template, which reads contents of {', '.join(chat['reads_parts'])} in parts"
    return "by its template"
