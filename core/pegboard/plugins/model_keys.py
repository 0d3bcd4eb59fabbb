"""The keys of a model's config that its family acts on, and the refusal of others.

A key that can change arithmetic is acted on or refused. Which can is a table: `declared_keys.toml`, every
attribute that a config class of transformers declares, less those that `passed_keys.toml` names, with a
reason. A key that nobody declares passes, and `check` names it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

from pegboard.config_values import shown
from pegboard.errors import CheckpointError

_NAMED = 4
"""Keys that an error names."""


class ReadConfig(dict[str, Any]):
    """A config, or a section of it, that remembers which of its keys were read.

    `get` and `[]` count as reading. A copy of it reads nothing, so that what the copy's reader acts on is
    refused rather than believed.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, Mapping) and not isinstance(value, ReadConfig):
            value = ReadConfig(value)
            self[key] = value
        self._read.add(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def unread(self, path: str = "") -> Iterator[tuple[str, str, Any]]:
        """(whole path, key, value) of each key that was not read; of sections that were, theirs."""
        for key, value in self.items():
            if key not in self._read:
                yield f"{path}{key}", key, value
            elif isinstance(value, ReadConfig):
                yield from value.unread(f"{path}{key}.")


def check_model_type(config: Mapping[str, Any], architecture: str) -> None:
    """Raises CheckpointError where `model_type` is that of another architecture: libraries go by either,
    and would build different models."""
    said = config.get("model_type")
    types = _table().model_types
    known = {kind for kinds in types.values() for kind in kinds}
    if said in known and architecture in types and said not in types[architecture]:
        raise CheckpointError(
            "model config model_type",
            f"{shown(said)}, and architectures says {architecture}",
            allowed=", ".join(types[architecture]),
            fix="get config.json from the model that the weights are of",
        )


def check_heeded(config: ReadConfig, architecture: str) -> None:
    """Raises CheckpointError where a key that can change arithmetic was not read by the model's family,
    and has a value that is not neutral."""
    table = _table()
    refused = [
        (path, value)
        for path, key, value in config.unread()
        if key in table.declared and not table.passes(key, value)
    ]
    if not refused:
        return
    path, value = refused[0]
    key = path.rpartition(".")[2]
    more = ", ".join(path for path, _ in refused[1:_NAMED])
    raise CheckpointError(
        f"model config {path}",
        f"{shown(value)}, which {architecture} does not act on here"
        + (f"; nor on {more}" if more else ""),
        allowed=", ".join(["no such key", *map(shown, table.neutral_of(key))]),
        fix="take a plugin whose model acts on it; or strike it, where the weights do not need it",
    )


def undeclared(config: ReadConfig) -> tuple[str, ...]:
    """Paths of the keys that were not read and that no known config declares."""
    table = _table()
    return tuple(
        path
        for path, key, value in config.unread()
        if not (key in table.declared or table.is_harmless(key) or _is_absent(value))
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """The rules in the files.

    Attributes:
        off: declared keys of which false is every default.
        declared: all declared keys.
        harmless: patterns of keys whose values change no token.
        neutral: patterns of keys to the values that mean the same as no such key.
        model_types: architecture to the model types that transformers builds it for.
    """

    off: frozenset[str]
    declared: frozenset[str]
    harmless: Sequence[str]
    neutral: Mapping[str, Sequence[Any]]
    model_types: Mapping[str, Sequence[str]]

    def is_harmless(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.harmless)

    def neutral_of(self, key: str) -> list[Any]:
        """Values that mean the same as no such key."""
        found = [
            value
            for pattern, values in self.neutral.items()
            if fnmatchcase(key, pattern)
            for value in values
        ]
        return [*found, *([False] if key in self.off and False not in found else [])]

    def passes(self, key: str, value: Any) -> bool:
        """Whether a value that nothing acts on changes no token."""
        return (
            _is_absent(value)
            or self.is_harmless(key)
            or any(_is_same(value, neutral) for neutral in self.neutral_of(key))
        )


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal, and a flag only to a flag."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


@cache
def _table() -> _Table:
    declared, passed = _read("declared_keys.toml"), _read("passed_keys.toml")
    return _Table(
        off=frozenset(declared["off"]),
        declared=frozenset(declared["off"]) | frozenset(declared["others"]),
        harmless=[pattern for patterns in passed["harmless"].values() for pattern in patterns],
        neutral=passed["neutral"],
        model_types=declared["model_types"],
    )


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("pegboard.plugins").joinpath(name).read_text("utf-8"))
