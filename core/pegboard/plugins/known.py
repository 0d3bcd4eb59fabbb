"""The distributions that provide names, so that an error about a missing plugin can say what to install.

`known.toml`, which tests/repo/known_plugins.py writes of the manifests of this project's own plugins, is
the one place in the core that lists plugins.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources


def suggestion(interface: str, name: str) -> str | None:
    """The distribution that provides a name, or reads a quantization method or checkpoint file."""
    return _known().get(interface, {}).get(name)


@cache
def _known() -> dict[str, dict[str, str]]:
    text = resources.files("pegboard.plugins").joinpath("known.toml").read_text(encoding="utf-8")
    known: dict[str, dict[str, str]] = tomllib.loads(text)
    return known
