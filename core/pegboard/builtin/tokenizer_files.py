"""Finds a checkpoint folder's tokenizer, chat template and special tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegboard.builtin.added_tokens import SETTINGS, special_and_added
from pegboard.builtin.checkpoint_json import read_optional_json
from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import TokenizerFacts
from pegboard.regular_files import MAX_TEMPLATE_BYTES, read_text


def tokenizer_facts(folder: Path) -> TokenizerFacts:
    """The facts in `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`,
    `added_tokens.json` and the chat template's file.

    Raises:
        CheckpointError: one of them is there and cannot be used.
    """
    settings = read_optional_json(folder / SETTINGS)
    special, added = special_and_added(folder, settings)
    eos = special.get("eos_token")
    file = folder / "tokenizer.json"
    return TokenizerFacts(
        file=str(file.absolute()) if file.exists() else None,
        chat_template=_chat_template(folder, settings),
        special_tokens=special,
        eos_token_id=next((one.token_id for one in added if one.content == eos), None),
        added_tokens=added,
    )


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """A file of its own goes before the tokenizer's settings."""
    file = folder / "chat_template.jinja"
    try:
        return read_text(file, limit=MAX_TEMPLATE_BYTES)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise CheckpointError(str(file), f"cannot be read ({error})") from error
    template = read_optional_json(folder / "chat_template.json").get("chat_template")
    return _default_template(template or settings.get("chat_template"))


def _default_template(template: Any) -> str | None:
    """The template, of several named ones the one called `default`."""
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        defaults = [entry.get("template") for entry in named if entry.get("name") == "default"]
        template = defaults[0] if defaults else None
    return template if isinstance(template, str) else None
