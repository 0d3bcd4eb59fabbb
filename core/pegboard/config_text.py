"""The config's text: YAML, `--set`, and the one line that says what is wrong with a value."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from pegboard.config_values import nearest, shown
from pegboard.errors import ConfigError, ConfigMistakes
from pegboard.regular_files import MAX_SETTINGS_BYTES, read_text

Location = tuple[int | str, ...]
"""Keys from the top to a value, and positions in lists."""

_UNKNOWN = ("extra_forbidden", "invalid_key")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a config file.

    Raises:
        ConfigError: no such file, not YAML, a key twice, or not a mapping.
    """
    where = os.fspath(path)
    try:
        text = read_text(path, limit=MAX_SETTINGS_BYTES)
    except FileNotFoundError:
        raise ConfigError(where, "no such file", fix="name a config file: --config FILE") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(where, f"cannot be read: {error}") from error
    values = parse_yaml(text, where)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(where, shown(values), allowed="a mapping of keys to values")
    return values


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises ConfigError with line and column; `where` is its thing."""
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(where, f"not YAML: {place}{error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(where, f"not YAML: {error}") from error
    except RecursionError:
        raise ConfigError(where, "nested too deeply, or in itself") from None


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, for which a key that stands twice is an error and not the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, key by key.

    A bare name below a mapping (`drafter: ngram`) counts as `{name: ngram}`.
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, (str, bool, int, float)) and isinstance(value, Mapping):
            old = {"name": old}
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = overlay(old, value)
        merged[key] = value
    return merged


def nested(path: str, value: Any) -> dict[str, Any]:
    """{a: {b: value}} of the path `a.b`."""
    for key in reversed(path.split(".")):
        value = {key: value}
    result: dict[str, Any] = value
    return result


def parse_set(text: str) -> dict[str, Any]:
    """The nested mapping that `--set a.b=value` says; the value is YAML."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        raise ConfigError("--set", shown(text), allowed="key=value, with dots between nested keys")
    return nested(path, parse_yaml(value, path))


def explain(error: ValidationError, schema: type[BaseModel]) -> ConfigError:
    """The error of pydantic's findings, in the words of the config file."""
    found: list[dict[str, Any]] = [dict(item) for item in error.errors(include_url=False)]
    unknown = [details["loc"] for details in found if details["type"] in _UNKNOWN]
    meant = {_meant(location, schema) for location in unknown}
    mistakes = [
        _mistake(details, schema)
        for details in found
        # A misspelt key is one mistake, not an unknown and a missing one.
        if not (details["type"] == "missing" and _path(details["loc"]) in meant)
    ]
    return mistakes[0] if len(mistakes) == 1 else ConfigMistakes(mistakes)


def _mistake(details: Mapping[str, Any], schema: type[BaseModel]) -> ConfigError:
    kind, location, value = details["type"], details["loc"], details["input"]
    path = _path(location)
    if kind in _UNKNOWN:
        return unknown_key((*location[:-1], str(location[-1])), schema)
    if kind == "missing":
        return ConfigError(path, "missing", fix=f"--set {path}=...")
    if kind == "model_type":
        keys = ", ".join(_section(location, schema).model_fields)
        return ConfigError(path, shown(value), allowed=f"a mapping of {keys}")
    if kind == "list_type":
        return ConfigError(path, shown(value), allowed="a list")
    context = details.get("ctx") or {}
    was = context.get("was") or f"{shown(value)}, {details['msg']}"
    return ConfigError(path, was, allowed=context.get("allowed", ""), fix=context.get("fix", ""))


def unknown_key(location: Location, schema: type[BaseModel]) -> ConfigError:
    """The refusal of a key, with the key that was probably meant."""
    meant = _meant(location, schema)
    return ConfigError(
        _path(location),
        "unknown key",
        allowed=", ".join(_section(location[:-1], schema).model_fields),
        fix=f"did you mean {meant!r}?" if meant else "",
    )


def _meant(location: Location, schema: type[BaseModel]) -> str | None:
    """The key meant by an unknown one: a similar one there, or the same name elsewhere."""
    *section, name = location
    similar = nearest(str(name), list(_section(section, schema).model_fields))
    if similar is not None:
        return _path((*section, similar))
    return next((key for key in all_keys(schema) if key.rpartition(".")[2] == name), None)


def all_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a schema."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        inner = _model_in(field.annotation)
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.")


def _path(location: Sequence[int | str]) -> str:
    """`observers[0].name`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in location)
    return text.removeprefix(".")


def _section(location: Sequence[int | str], schema: type[BaseModel]) -> type[BaseModel]:
    """The schema of what stands there."""
    for key in location:
        field = schema.model_fields.get(str(key))
        schema = (_model_in(field.annotation) if field else None) or schema
    return schema


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, itself or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_in(argument) for argument in get_args(annotation))
    return next((model for model in inner if model is not None), None)
