"""Bounds of the texts, lists and mappings of a body, by the operator's limits.

A body's type says beside each of its fields which setting of `server.limits` bounds it. The limits
themselves are the context of a validation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pegboard.config import LimitsConfig

OVER_LIMIT = "over_limit"
"""Kind of pydantic's error for a value that is over a limit."""

Info = core_schema.ValidationInfo[LimitsConfig]


class Bound(ABC):
    """An annotation that looks at a field's value before its type does."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def check(value: Any, info: Info) -> Any:
            self.check(value, info.context)
            return value

        return core_schema.with_info_before_validator_function(check, handler(source))

    @abstractmethod
    def check(self, value: Any, limits: LimitsConfig) -> None:
        """Raises PydanticCustomError for a value that is over a limit; one of another type passes."""


@dataclass(frozen=True)
class AtMost(Bound):
    """Bounds the characters of a text, the elements of a list or the keys of a mapping.

    Attributes:
        setting: the bound's name.
        characters: name of the bound on the characters of all texts in a list or mapping.
    """

    setting: str
    characters: str | None = None

    def check(self, value: Any, limits: LimitsConfig) -> None:
        if not isinstance(value, str | list | dict):
            return
        what = {str: "characters", list: "elements", dict: "keys"}[type(value)]
        _hold(len(value), what, self.setting, limits)
        if self.characters is not None and not isinstance(value, str):
            _hold(sum(map(len, _texts(value))), "characters", self.characters, limits)


@dataclass(frozen=True)
class BytesAtMost(Bound):
    """Bounds a value of any shape by its size as JSON."""

    setting: str

    def check(self, value: Any, limits: LimitsConfig) -> None:
        _hold(len(msgspec.json.encode(value)), "bytes", self.setting, limits)


def _hold(number: int, what: str, setting: str, limits: LimitsConfig) -> None:
    if number > getattr(limits, setting):
        message = f"{number} {what}; allowed: {limits.allowed(setting)}"
        raise PydanticCustomError(OVER_LIMIT, "{message}", {"message": message})


def _texts(value: list[Any] | dict[str, Any]) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        yield from _texts(list(value.values()))
    else:
        yield from (text for text in value if isinstance(text, str))
