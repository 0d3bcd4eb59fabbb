"""What every command that takes a config has in common: MODEL, `--config`, `--set`, the flags."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pegboard.cli.flags import FLAGS, REFUSED_FLAGS, Flag
from pegboard.config import Config, load_config
from pegboard.config_text import nested, overlay
from pegboard.errors import ConfigError

EITHER_DASH = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""Settings of a typer command for which `--max_model_len` is `--max-model-len`."""


def takes_config(command: Callable[..., None], *, flags: Sequence[Flag] = FLAGS) -> Any:
    """A command for typer: `command` with the common arguments instead of its `config: Config`."""
    signature = inspect.signature(command, eval_str=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != "config"
    ]
    common = list(_common_parameters(flags))

    @functools.wraps(command)
    def with_config(**arguments: Any) -> None:
        given = {parameter.name: arguments.pop(parameter.name) for parameter in common}
        command(config=read_config(given, flags), **arguments)

    parameters = [*common[:1], *own, *common[1:]]
    with_config.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_config.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_config


def read_config(given: Mapping[str, Any], flags: Sequence[Flag] = FLAGS) -> Config:
    """The config of the common arguments: the file, over it MODEL and flags, over them `--set`.

    Raises:
        ConfigError: a value is wrong, or a flag has no effect here.
    """
    for refused in REFUSED_FLAGS:
        if given.get(refused.parameter):
            raise ConfigError(refused.name, refused.why, fix=refused.fix)
    values: dict[str, Any] = {} if given["model"] is None else {"model": given["model"]}
    for flag in flags:
        value = given[flag.parameter]
        if value not in (None, []):
            name = flag.name.partition("/")[0]
            values = overlay(values, nested(flag.key, flag.read(value, name)))
    return load_config(given["config"], values, given["set"] or ())


def _common_parameters(flags: Sequence[Flag]) -> Iterator[inspect.Parameter]:
    yield _parameter(
        "model",
        typer.Argument(help="A folder, a file, a hub id or pkg://package/file.", metavar="MODEL"),
        str,
    )
    yield _parameter("config", typer.Option("--config", help="A YAML file.", metavar="FILE"), Path)
    yield _parameter(
        "set", typer.Option("--set", help="Sets any key.", metavar="KEY=VALUE"), list[str]
    )
    for flag in flags:
        option = typer.Option(*flag.names, help=flag.help, metavar=flag.metavar)
        yield _parameter(flag.parameter, option, flag.type)
    for refused in REFUSED_FLAGS:
        yield _parameter(refused.parameter, typer.Option(refused.name, hidden=True), refused.type)


def _parameter(name: str, declaration: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, declaration],
    )
