"""Keys: from the config, files, or the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pegboard.config import ServerConfig
from pegboard.errors import ConfigError
from pegboard.regular_files import MAX_SETTINGS_BYTES, read_text

API_VARIABLE = "PEGBOARD_API_KEY"
ADMIN_VARIABLE = "PEGBOARD_ADMIN_KEY"
"""Each holds keys, separated by commas, where the config has none. On a command line everybody sees
them."""

FILE = "file:"
"""Begins an entry that is not a key, but names a file with one on each line."""


@dataclass(frozen=True)
class Keys:
    """The keys of a server.

    Attributes:
        api: each lets a client in; without any, everybody may come in.
        admin: each lets in too, also to the routes that concern all clients.
    """

    api: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.api, *self.admin)


def read_keys(config: ServerConfig, environment: Mapping[str, str]) -> Keys:
    """The keys of a config; of the environment, where it has none.

    Raises:
        ConfigError: a file cannot be read, there is no key where keys were meant to be, a key cannot be
            sent in a header, or is both an admin's and a user's.
    """
    keys = Keys(
        _read("server.api_keys", config.api_keys, API_VARIABLE, environment),
        _read("server.admin_keys", config.admin_keys, ADMIN_VARIABLE, environment),
    )
    if set(keys.api) & set(keys.admin):
        raise ConfigError(
            "server.admin_keys", "holds a key of server.api_keys", fix="use another one here"
        )
    return keys


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for child processes, which have no use for the keys."""
    return {k: v for k, v in environment.items() if k not in (API_VARIABLE, ADMIN_VARIABLE)}


def _read(
    setting: str, configured: Sequence[str] | None, variable: str, environment: Mapping[str, str]
) -> tuple[str, ...]:
    if configured is not None:
        found = [(setting, key) for entry in configured for key in _expand(setting, entry)]
    elif variable in environment:
        parts = environment[variable].split(",")
        found = [(variable, part) for part in parts if part.strip()]
        if not found:
            raise ConfigError(variable, "holds no key", fix="unset it, or put keys into it")
    else:
        return ()
    return tuple(_checked(source, key.strip()) for source, key in found)


def _expand(setting: str, entry: str) -> Sequence[str]:
    if not entry.startswith(FILE):
        return [entry]
    path = entry.removeprefix(FILE)
    try:
        lines = read_text(path, limit=MAX_SETTINGS_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(setting, f"{path} cannot be read ({error})") from None
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise ConfigError(setting, f"{path} holds no key", allowed="one on each line")
    return keys


def _checked(source: str, key: str) -> str:
    # The key is not shown.
    if not key:
        raise ConfigError(source, "a blank key", fix="leave it out, or put a key there")
    if not key.isprintable():
        raise ConfigError(source, "a key with control characters", allowed="printable characters")
    return key
