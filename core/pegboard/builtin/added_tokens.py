"""Special and added tokens that the files beside a folder's `tokenizer.json` name. Torch-free.

Where `tokenizer_config.json` has `added_tokens_decoder` it says everything; older folders spread the
same over `special_tokens_map.json` and `added_tokens.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pegboard.builtin.checkpoint_json import read_optional_json
from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import AddedToken

SETTINGS = "tokenizer_config.json"
_DECODER = "added_tokens_decoder"
_ADDED = "added_tokens.json"
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")

Named = Mapping[str, Any]


def special_and_added(
    folder: Path, settings: Named
) -> tuple[dict[str, str], tuple[AddedToken, ...]]:
    """`bos_token` and the like to their texts, and all tokens that are to be added, in order.

    Args:
        folder: of the checkpoint.
        settings: of its `tokenizer_config.json`.

    Raises:
        CheckpointError: a file is damaged, or a token in it is none.
    """
    decoder = settings.get(_DECODER)
    if decoder is not None:
        named, numbered = settings, _numbered(folder / SETTINGS, decoder)
    else:
        # The map was written after the settings, and goes before them.
        named = {**settings, **read_optional_json(folder / "special_tokens_map.json")}
        numbered = {}
    special = {key: token for key, value in _named(named) if (token := _token(value)) is not None}
    listed = [token for value in _listed(named) if (token := _token(value)) is not None]
    if decoder is None:
        are_special = {token.content for token in (*special.values(), *listed)}
        numbered = _older(folder / _ADDED, are_special)
    added = (*(numbered[token_id] for token_id in sorted(numbered)), *special.values(), *listed)
    first = {token.content: token for token in reversed(added)}
    # A token is special if any of the files says so.
    names = {token.content for token in special.values()}
    unique = tuple(
        replace(token, special=True) if token.content in names else token
        for token in added
        if first[token.content] is token
    )
    return {key: token.content for key, token in special.items()}, unique


def _named(values: Named) -> Iterator[tuple[str, Any]]:
    """Names and tokens: `bos_token` and the like, and those of a mapping of extra ones."""
    extra = values.get(_LISTS[0])
    named = {key: value for key, value in values.items() if key.endswith("_token")}
    yield from (named | extra if isinstance(extra, dict) else named).items()


def _listed(values: Named) -> Iterator[Any]:
    """Tokens that have no name."""
    for key in _LISTS:
        if isinstance(values.get(key), list):
            yield from values[key]


def _token(value: Any) -> AddedToken | None:
    """A special token, given as a text or as an object with `content`; None: something else."""
    if isinstance(value, str):
        return AddedToken(value)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {key: value[key] for key in _FLAGS if isinstance(value.get(key), bool)}
        return AddedToken(value["content"], **{**flags, "special": True})
    return None


def _numbered(file: Path, decoder: Any) -> dict[int, AddedToken]:
    """The tokens of an `added_tokens_decoder`, by id."""
    if not isinstance(decoder, dict):
        raise CheckpointError(str(file), f"{_DECODER} {decoder!r:.80}", allowed="an object")
    tokens = {}
    for key, value in decoder.items():
        is_token = isinstance(value, dict) and isinstance(value.get("content"), str)
        if not (key.isascii() and key.isdigit() and len(key) < 11) or not is_token:
            was = f"{_DECODER} { {key: value}!r:.80}"
            raise CheckpointError(str(file), was, allowed="ids to objects with a content")
        flags = {name: value.get(name) is True for name in _FLAGS}
        if "normalized" not in value:
            flags["normalized"] = not flags["special"]
        tokens[int(key)] = AddedToken(value["content"], int(key), **flags, overrides=True)
    return tokens


def _older(file: Path, special: set[str]) -> dict[int, AddedToken]:
    """The tokens of an `added_tokens.json`, by id."""
    tokens = {}
    for text, token_id in read_optional_json(file).items():
        if type(token_id) is not int or token_id < 0:
            raise CheckpointError(str(file), f"{ {text: token_id}!r:.80}", allowed="texts to ids")
        is_special = text in special
        tokens[token_id] = AddedToken(text, token_id, is_special, normalized=not is_special)
    return tokens
