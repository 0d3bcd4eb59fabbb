"""The configs that are looked at, and the text that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.compose import Prepared, load_tokenizer, prepare
from pegboard.config import Config, load_config
from pegboard.config_text import overlay
from pegboard.errors import ConfigError, TokenizerError
from pegboard.eval.report import Text
from pegboard.eval.windows import Window, windows

if TYPE_CHECKING:
    from pegboard.tokenizer import Tokenizer


@dataclass(frozen=True)
class Subject:
    """A config under test. `ref` is the value of `flag`."""

    flag: str
    ref: str
    prepared: Prepared
    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        return self.prepared.composition.target.shape.vocab_size

    def config(self, **changed: Any) -> Config:
        """The config, with some keys changed."""
        values = self.prepared.config.model_dump(
            mode="json", exclude_unset=True, exclude={"server": {"api_keys"}}
        )
        return Config.from_values(overlay(values, changed))


@dataclass(frozen=True)
class Reading:
    """A text's tokens, and how they are cut."""

    file: str
    token_ids: Sequence[int]
    bos: int | None
    length: int
    stride: int

    @property
    def windows(self) -> tuple[Window, ...]:
        return windows(self.token_ids, self.length, self.stride, self.bos)

    def text(self) -> Text:
        return Text(
            file=self.file,
            num_tokens=len(self.token_ids),
            window=self.length,
            stride=self.stride,
            num_windows=len(self.windows),
            bos=self.bos,
        )


def subject(flag: str, ref: str | None, sets: Sequence[str]) -> Subject:
    """The config of a flag's value, a YAML file or a model, with texts `key=value` over it.

    Raises:
        UserError: it does not go together, or has no tokenizer.
    """
    if ref is None:
        raise ConfigError(flag, "missing", fix=f"{flag} FILE.yaml, or a model")
    if Path(ref).suffix in (".yaml", ".yml"):
        config = load_config(Path(ref), {}, sets)
    else:
        config = load_config(None, {"model": ref}, sets)
    prepared = prepare(config)
    tokenizer = load_tokenizer(prepared)
    if tokenizer is None:
        where = prepared.composition.target.facts.path
        raise TokenizerError(where, "has no tokenizer", fix="set tokenizer to a folder with one")
    return Subject(flag, ref, prepared, tokenizer)


def common_tokens(subjects: Sequence[Subject], text: str) -> tuple[Sequence[int], int | None]:
    """The text's ids, and the id that a text begins with, if any, on which all must agree.

    Raises:
        ConfigError: they do not.
    """
    first, *others = subjects
    token_ids, bos = _tokens(first.tokenizer, text)
    for other in others:
        if other.vocab_size != first.vocab_size:
            raise ConfigError(
                other.flag,
                f"{other.ref} has a vocabulary of {other.vocab_size} tokens",
                allowed=f"one of {first.vocab_size}, as {first.ref} has",
            )
        if _tokens(other.tokenizer, text) != (token_ids, bos):
            raise ConfigError(
                other.flag,
                f"{other.ref} makes other tokens of the text than {first.ref}",
                fix="--against-set tokenizer=FOLDER",
            )
    return token_ids, bos


def _tokens(tokenizer: Tokenizer, text: str) -> tuple[list[int], int | None]:
    """A text's ids, and the id that the tokenizer puts before a text, if it does."""
    alone, whole = (tokenizer.encode("a", special=special) for special in (False, True))
    bos = whole[0] if whole[:1] != alone[:1] else None
    return tokenizer.encode(text, special=False), bos
