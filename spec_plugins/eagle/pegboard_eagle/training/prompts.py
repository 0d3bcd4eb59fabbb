"""The prompts that the target answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pegboard import Engine
from pegboard.errors import ConfigError, TokenizerError

ALLOWED = (
    "an object with `prompt` (a text), `turns` (texts, of which the first is taken) or `messages`"
)

Prompt = str | list[Any]
"""A text, or the messages of a conversation."""


def read_prompts(path: Path, option: str) -> list[Prompt]:
    """The prompts of a file: JSON lines in `*.jsonl`, else one a line; none twice.

    Args:
        option: the flag that names the file, for errors.

    Raises:
        ConfigError: it cannot be read, or holds something else, or nothing.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(option, f"{path} cannot be read: {problem}") from None
    found: dict[str, Prompt] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}: line {number}"
            prompt = _parsed(line, option, where) if path.suffix == ".jsonl" else line.strip()
            found.setdefault(json.dumps(prompt), prompt)
    if not found:
        raise ConfigError(option, f"{path} holds no prompt", allowed="one a line")
    return list(found.values())


def encoded(
    engine: Engine, prompts: Iterable[Prompt], max_tokens: int
) -> dict[int, tuple[int, ...]]:
    """Token ids by the prompts' numbers, in the target's chat format where it has one; without those that
    are longer, and without a second one of the same ids.

    Raises:
        TokenizerError: the model has no tokenizer, or no chat format for messages.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise TokenizerError("model", "has no tokenizer, and prompts are texts")
    made: dict[tuple[int, ...], int] = {}
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) and tokenizer.chat is None:
            ids = tokenizer.encode(prompt)
        else:
            text = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = tokenizer.encode_chat(text)
        if 0 < len(ids) <= max_tokens:
            made.setdefault(tuple(ids), number)
    return {number: ids for ids, number in made.items()}


def _parsed(line: str, option: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as problem:
        raise ConfigError(option, f"{where}: {problem}", allowed=ALLOWED) from None
    if isinstance(value, Mapping):
        turns, messages = value.get("turns"), value.get("messages")
        text = turns[0] if isinstance(turns, list) and turns else value.get("prompt")
        if isinstance(text, str) and text.strip():
            return text
        if isinstance(messages, list) and messages:
            return messages
    raise ConfigError(option, f"{where} holds no prompt", allowed=ALLOWED)
