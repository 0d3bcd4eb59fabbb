"""Reads a model's config with checks: each wrong value is one line naming its key. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pegboard.errors import CheckpointError

MAX_SIZE = 2**31 - 1
T = TypeVar("T")


class ConfigValues:
    """A config's values by key; null and an empty list or mapping count as absent, where `is_null` does
    not tell them apart.

    Args:
        values: the config, or a section of it.
        path: put before a key in messages (`rope_scaling.`).
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def __contains__(self, key: str) -> bool:
        return self._value(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is there, with null."""
        return key in self._values and self._values[key] is None

    def size(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_SIZE
    ) -> int:
        """A whole number of a range; required where there is no default."""
        allowed = f"a whole number, {minimum} to {maximum}"
        value = self._get(key, default, allowed)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not minimum <= value <= maximum:
            raise self.error(key, f"{value!r}", allowed=allowed)
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number over 0; required where there is no default."""
        value = self._get(key, default, "a number over 0")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (math.isfinite(value) and value > 0):
            raise self.error(key, f"{value!r}", allowed="a number over 0")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        return self._typed(key, default, bool, "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        """A text; required where there is no default."""
        return self._typed(key, default, str, "a text")

    def texts(self, key: str) -> Sequence[str]:
        """A list of texts."""
        value = self._get(key, None, "a list of texts")
        if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
            raise self.error(key, f"{value!r}", allowed="a list of texts")
        return value

    def without_effect(self, *keys: str) -> None:
        """Declares keys whose values change nothing here. The host refuses keys that nobody declares."""
        for key in keys:
            self._values.get(key)

    def section(self, key: str) -> ConfigValues:
        """A nested mapping; an empty one where the key is absent."""
        value = self._get(key, {}, "a mapping")
        if not isinstance(value, Mapping):
            raise self.error(key, f"{value!r}", allowed="a mapping")
        return ConfigValues(value, f"{self._path}{key}.")

    def error(self, key: str, was: str, *, allowed: str = "", fix: str = "") -> CheckpointError:
        """The error that names this key."""
        return CheckpointError(f"model config {self._path}{key}", was, allowed=allowed, fix=fix)

    def _typed(self, key: str, default: Any, kind: type[T], allowed: str) -> T:
        value = self._get(key, default, allowed)
        if not isinstance(value, kind):
            raise self.error(key, f"{value!r}", allowed=allowed)
        return value

    def _get(self, key: str, default: Any, allowed: str) -> Any:
        value = self._value(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "missing", allowed=allowed)
        return value

    def _value(self, key: str) -> Any:
        value = self._values.get(key)
        return None if value == [] or value == {} else value
