"""The prompts of a completion: a text, texts, token ids, or lists of them."""

from __future__ import annotations

from typing import Any

from pydantic import ValidatorFunctionWrapHandler

from pegboard.errors import RequestError

Prompts = str | list[str] | list[int] | list[list[int]]

_ALLOWED = "a text, a list of texts, a list of token ids, or a list of such lists"


def read_prompts(value: Any, _handler: ValidatorFunctionWrapHandler) -> list[str] | list[list[int]]:
    """One entry a prompt. A validator: of a union, pydantic would report every wrong element.

    Raises:
        RequestError: the value is none of the kinds, or there is no prompt in it.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError("prompt", f"of type {type(value).__name__}", allowed=_ALLOWED)
    if not value:
        raise RequestError("prompt", "an empty list", allowed=_ALLOWED)
    if _all_ids(value):
        return [value]
    if all(isinstance(prompt, str) for prompt in value):
        return value
    if all(isinstance(prompt, list) and prompt and _all_ids(prompt) for prompt in value):
        return value
    raise RequestError("prompt", "a list of something else", allowed=_ALLOWED)


def _all_ids(values: list[Any]) -> bool:
    # A boolean is an int to Python, not to JSON.
    return all(type(value) is int and 0 <= value < 2**31 for value in values)
