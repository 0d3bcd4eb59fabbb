"""The prompts of a completion: a text, texts, token ids, or lists of them."""

from __future__ import annotations

from typing import Any

from pydantic import ValidatorFunctionWrapHandler
from pydantic_core.core_schema import ValidationInfo

from pegboard.config import LimitsConfig
from pegboard.errors import RequestError

Prompts = str | list[str] | list[int] | list[list[int]]

_ALLOWED = "a text, a list of texts, a list of token ids, or a list of such lists"


def read_prompts(
    value: Any, _handler: ValidatorFunctionWrapHandler, info: ValidationInfo[LimitsConfig]
) -> list[str] | list[list[int]]:
    """One entry a prompt. A validator: of a union, pydantic would report every wrong element.

    Raises:
        RequestError: the value is none of the kinds, or holds no prompt, or too many.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError("prompt", f"of type {type(value).__name__}", allowed=_ALLOWED)
    if not value:
        raise RequestError("prompt", "an empty list", allowed=_ALLOWED)
    if _is_id(value[0]):
        if _all_ids(value):
            return [value]
    elif len(value) > info.context.prompts:
        allowed = info.context.allowed("prompts")
        raise RequestError("prompt", f"{len(value)} of them", allowed=allowed)
    if all(isinstance(prompt, str) for prompt in value):
        return value
    if all(isinstance(prompt, list) and prompt and _all_ids(prompt) for prompt in value):
        return value
    raise RequestError("prompt", "a list of something else", allowed=_ALLOWED)


def _all_ids(values: list[Any]) -> bool:
    return all(map(_is_id, values))


def _is_id(value: Any) -> bool:
    # A boolean is an int to Python, not to JSON.
    return type(value) is int and 0 <= value < 2**31
