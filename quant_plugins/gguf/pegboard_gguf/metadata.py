"""Typed access to a file's metadata, with errors that name file and key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pegboard.errors import CheckpointError

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Metadata:
    """Metadata of one file. A key written as `.name` belongs to the file's architecture.

    It remembers which keys were read.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values
        self._read: set[str] = set()
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return self._value(key) is not None

    def unread(self) -> Iterator[tuple[str, Any]]:
        """The architecture's keys that nothing read, as `.name`, and their values."""
        for key, value in self._values.items():
            if key.startswith(f"{self.architecture}.") and key not in self._read:
                yield key.removeprefix(self.architecture), value

    def value(self, key: str) -> Any:
        """A value of any type, as the file has it."""
        return self._values[self._full(key)]

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, str, "a text", default))

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number. One value for each layer is accepted where all are the same."""
        value = self._value(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        elif isinstance(value, list):
            raise self.fault(key, f"differs from layer to layer: {value[:8]}", "one value")
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fault(key, "is missing" if value is None else f"is {value!r}", "a number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number stored as float32, as the shortest decimal that means the same float32."""
        value = self._get(key, (int, float), "a number", default)
        if not abs(value) < _FLOAT32_MAX:  # not a number included
            raise self.fault(key, f"is {value!r}", "a number")
        return float(str(np.float32(value)))

    def flag(self, key: str, *, default: bool) -> bool:
        return bool(self._get(key, bool, "true or false", default))

    def items(self, key: str) -> list[Any]:
        """An array, empty where the file has none."""
        return list(self._get(key, list, "an array", []))

    def token_id(self, key: str, num_tokens: int) -> int | None:
        """An id of the vocabulary; None where the file has none."""
        if key not in self:
            return None
        token_id = self.whole(key)
        # 2**32 - 1 is how some writers say "none".
        return token_id if 0 <= token_id < num_tokens else None

    def fault(self, key: str, was: str, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self._full(key)}", was, allowed=allowed)

    def _get(self, key: str, kind: type | tuple[type, ...], allowed: str, default: Any) -> Any:
        value = self._value(key, default)
        if not isinstance(value, kind):
            raise self.fault(key, "is missing" if value is None else f"is {value!r:.80}", allowed)
        return value

    def _value(self, key: str, default: Any = None) -> Any:
        full = self._full(key)
        self._read.add(full)
        return self._values.get(full, default)

    def _full(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key
