"""The TOML of a manifest, parsed at a bounded cost: a parser takes time and memory by the square of a
key's parts, and a stack by the depth of brackets."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_BYTES = 64 * 1024
"""Most bytes of a manifest. One with a dozen parts has 5 KiB."""
MAX_KEY_PARTS = 8
MAX_DEPTH = 8
"""Brackets within brackets."""

_QUOTED = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"""|\Z)'  # an end that is missing ends with the text or line, so that
    r"|'''.*?(?:'''|\Z)"  # no part of a text is looked at twice
    r'|"(?:\\.|[^"\\\n])*(?:"|$)'
    r"|'[^'\n]*(?:'|$)"
    r"|#[^\n]*",
    re.DOTALL | re.MULTILINE,
)
_LONG_KEY = re.compile(rf'(?:(?:[\w-]+|"")[ \t]*\.[ \t]*){{{MAX_KEY_PARTS}}}')
_LONG_WORD = re.compile(r"[\w.+-]{200}")  # looked for first: the search for keys is slow in words


class ManifestTextInvalid(ValueError):
    """The text is no TOML of a manifest."""


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a manifest.

    Raises:
        ManifestTextInvalid: it is too long or nested too deep, or no TOML.
    """
    if len(text.encode()) > MAX_BYTES:
        raise ManifestTextInvalid(f"larger than {MAX_BYTES // 1024} KiB")
    bare = _QUOTED.sub(lambda found: "" if found[0].startswith("#") else '""', text)
    if _LONG_WORD.search(bare):
        raise ManifestTextInvalid("a word of more than 200 characters without quotes")
    if _LONG_KEY.search(bare):
        raise ManifestTextInvalid(f"a key of more than {MAX_KEY_PARTS} parts")
    if _depth(bare) > MAX_DEPTH:
        raise ManifestTextInvalid(f"brackets nested more than {MAX_DEPTH} deep")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError, OverflowError) as problem:
        raise ManifestTextInvalid(str(problem)) from None


def _depth(bare: str) -> int:
    depth = deepest = 0
    for char in bare:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth = max(depth - 1, 0)
    return deepest
