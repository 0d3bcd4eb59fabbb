"""API keys: from the config, a file, or the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pegboard.errors import ConfigError

VARIABLE = "PEGBOARD_API_KEY"
"""Holds keys, separated by commas, where the config has none. On a command line everybody sees them."""

FILE = "file:"
"""Begins an entry that is not a key, but names a file with one on each line."""


def read_keys(configured: Sequence[str] | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys that let a client in; none at all let everybody in.

    Args:
        configured: `server.api_keys`: keys, and files of keys.
        environment: of this process.

    Raises:
        ConfigError: a file cannot be read, or there is no key where keys were meant to be.
    """
    if configured is not None:
        return tuple(key for entry in configured for key in _expand(entry))
    if VARIABLE not in environment:
        return ()
    keys = tuple(key for part in environment[VARIABLE].split(",") if (key := part.strip()))
    if not keys:
        raise ConfigError(VARIABLE, "holds no key", fix="unset it, or put keys into it")
    return keys


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for child processes, which have no use for the keys."""
    return {name: value for name, value in environment.items() if name != VARIABLE}


def _expand(entry: str) -> Sequence[str]:
    if not entry.startswith(FILE):
        return [entry]
    path = entry.removeprefix(FILE)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError("server.api_keys", f"{path} cannot be read ({error})") from None
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise ConfigError("server.api_keys", f"{path} holds no key", allowed="one on each line")
    return keys
