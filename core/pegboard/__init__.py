"""Pegboard: an LLM inference engine that people extend instead of fork.

The public names; each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pegboard import errors as errors
    from pegboard.config import Config as Config
    from pegboard.llm import LLM as LLM
    from pegboard.llm import Engine as Engine
    from pegboard.plugins.hookspecs import hookimpl as hookimpl
    from pegboard.request import SamplingParams as SamplingParams

__version__ = "0.1.0"

_PLACES = {
    "Config": "pegboard.config",
    "Engine": "pegboard.llm",
    "LLM": "pegboard.llm",
    "SamplingParams": "pegboard.request",
    "hookimpl": "pegboard.plugins.hookspecs",
}

__all__ = ["LLM", "Config", "Engine", "SamplingParams", "errors", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("pegboard.errors")
    if name not in _PLACES:
        raise AttributeError(f"module 'pegboard' has no attribute {name!r}")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value
