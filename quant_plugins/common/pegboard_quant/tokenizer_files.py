"""A tokenizer's files, made of what a checkpoint without such files says of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegboard.interfaces.checkpoint import TokenizerFacts


def tokenizer_of(facts: TokenizerFacts) -> dict[str, Any]:
    """The content of a `tokenizer.json`; what begins and ends a plain prompt by rule of the
    checkpoint is in its post-processor, where other libraries look for it."""
    assert facts.file is not None
    tokenizer: dict[str, Any] = json.loads(Path(facts.file).read_text(encoding="utf-8"))
    if facts.add_bos is None:
        return tokenizer
    texts = facts.special_tokens
    first = _known(tokenizer, texts.get("bos_token") if facts.add_bos else None)
    last = _known(tokenizer, texts.get("eos_token") if facts.add_eos else None)
    tokenizer["post_processor"] = None
    if first or last:
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": _template(first, last, "A", 0),
            "pair": _template(first, last, "A", 0) + _template(first, last, "B", 1),
            "special_tokens": {
                text: {"id": text, "ids": [token_id], "tokens": [text]}
                for text, token_id in (first | last).items()
            },
        }
    return tokenizer


def settings_of(facts: TokenizerFacts) -> dict[str, Any]:
    """The content of a `tokenizer_config.json`."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **facts.special_tokens,
    }
    if facts.add_bos is not None:
        settings |= {"add_bos_token": facts.add_bos, "add_eos_token": facts.add_eos}
    if facts.chat_template is not None:
        settings["chat_template"] = facts.chat_template
    return settings


def _known(tokenizer: Mapping[str, Any], text: str | None) -> dict[str, int]:
    """The text and its id; empty where there is none."""
    if text is None:
        return {}
    vocabulary = tokenizer["model"]["vocab"]
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    ids |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    return {text: ids[text]} if text in ids else {}


def _template(
    first: Mapping[str, int], last: Mapping[str, int], sequence: str, type_id: int
) -> list[dict[str, Any]]:
    return [
        *({"SpecialToken": {"id": text, "type_id": type_id}} for text in first),
        {"Sequence": {"id": sequence, "type_id": type_id}},
        *({"SpecialToken": {"id": text, "type_id": type_id}} for text in last),
    ]
