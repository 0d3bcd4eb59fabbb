"""Prompts: of random words, or of a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pegboard.bench.options import MAX_LENGTH, Lengths
from pegboard.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

_TEXT = (
    "the of and to in is was for that on with as by at from it an be this which or are not but had"
    " have one all were there been their they you when more out if so up into some can time her only"
    " two may then its now such over first new after also made many any like well work year know get"
    " house world life hand part place point number water group family country system night side"
    " school state under head small long little good great right high old away room door light"
    " morning story music paper river mountain garden window letter winter summer"
)
WORDS = tuple(_TEXT.split())
"""Common words, most of which are one token to most models."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, and how many tokens are asked for.

    Attributes:
        content: text, or token ids.
        output_len: tokens of the answer.
    """

    content: str | list[int]
    output_len: int

    def beginning(self) -> str | list[int]:
        """A few words or tokens of it: less than a prefix cache would remember."""
        return self.content[:8]


class _Line(msgspec.Struct):
    """A line of a dataset. Other keys are ignored."""

    prompt: str | list[int]
    output_tokens: int | None = None


def random_prompts(
    token_ids: Sequence[int],
    lengths: Sequence[int],
    output_lens: Sequence[int],
    rng: np.random.Generator,
) -> list[Prompt]:
    """Prompts of exactly those lengths.

    Args:
        token_ids: what to draw from; none: prompts are texts of as many words.
    """
    drawn = [rng.integers(0, len(token_ids or WORDS), size=length).tolist() for length in lengths]
    contents: list[str | list[int]] = [
        [token_ids[index] for index in indices]
        if token_ids
        else " ".join(WORDS[index] for index in indices)
        for indices in drawn
    ]
    return [Prompt(content, n) for content, n in zip(contents, output_lens, strict=True)]


def dataset_prompts(
    path: Path, count: int, output_lens: Lengths, rng: np.random.Generator
) -> list[Prompt]:
    """The prompts of a file in its order, from the beginning again where it has too few.

    Each line is a JSON object with `prompt`, a text or token ids, and perhaps `output_tokens`; without
    it the answer's length is drawn.

    Raises:
        ConfigError: the file or a line of it is something else.
    """
    lines = list(itertools.islice(_read(path), count))
    if not lines:
        raise ConfigError("--dataset", f"{path} holds no prompt")
    drawn = output_lens.sample(count, rng)
    return [
        Prompt(line.prompt, length if line.output_tokens is None else line.output_tokens)
        for line, length in zip(itertools.cycle(lines), drawn, strict=False)
    ]


def _read(path: Path) -> Iterator[_Line]:
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield _line(text, f"{path}, line {number}")
    except OSError as error:
        raise ConfigError("--dataset", f"{path}: {error.strerror}") from None


def _line(text: bytes, where: str) -> _Line:
    allowed = 'a JSON object like {"prompt": "Hello", "output_tokens": 64}'
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("--dataset", f"{where}: {error}", allowed=allowed) from None
    if not line.prompt:
        raise ConfigError("--dataset", f"{where}: an empty prompt", allowed=allowed)
    if line.output_tokens is not None and not 1 <= line.output_tokens <= MAX_LENGTH:
        was = f"{where}: output_tokens is {line.output_tokens}"
        raise ConfigError("--dataset", was, allowed=f"1 to {MAX_LENGTH}")
    return line
