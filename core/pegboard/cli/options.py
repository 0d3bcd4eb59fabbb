"""The options of every command that takes a config: MODEL, `--config`, `--set`, the flags."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from pegboard.cli.flags import FLAGS, REFUSED_FLAGS, Flag
from pegboard.config import Config, load_config
from pegboard.config_text import nested, overlay
from pegboard.errors import ConfigError

LoadLimit = Annotated[
    float | None,
    typer.Option("--load-limit", help="Seconds that --load gives a process.", min=0.1),
]

EITHER_DASH = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""Settings of a typer command for which `--max_model_len` is `--max-model-len`."""


class SeveralValues(TyperCommand):
    """Takes `--api-key A B` for `--api-key A --api-key B`, as other engines have it, wherever a flag may
    stand several times."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name: param for param in self.params for name in param.opts}
        return super().parse_args(ctx, _one_by_one(args, options))


def _one_by_one(arguments: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Writes a flag that may stand several times before each value that follows one. Where no other word
    is the MODEL, the last of those is."""
    left, spread = deque(arguments), list[str]()
    has_model, maybe_model = False, None
    while left and left[0] != "--":
        word = left.popleft()
        spread.append(word)
        name, equals, _ = word.partition("=")
        option = options.get(EITHER_DASH["token_normalize_func"](name))
        if not word.startswith("-"):
            has_model = True
        elif option is not None and not option.is_flag:
            if not equals and left:
                spread.append(left.popleft())
            while option.multiple and left and not left[0].startswith("-"):
                maybe_model = len(spread)
                spread += [name, left.popleft()]
    if not has_model and len(left) < 2 and maybe_model is not None:
        del spread[maybe_model]
    return [*spread, *left]


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
    set_by: dict[str, tuple[str, Any]] = {}
    for flag in flags:
        value = given[flag.parameter]
        if value not in (None, []):
            name = flag.name.partition("/")[0]
            read = flag.read(value, name)
            other, earlier = set_by.setdefault(flag.key, (name, read))
            if read != earlier:
                raise ConfigError(name, f"contradicts {other}", fix="leave out one of the two")
            values = overlay(values, nested(flag.key, read))
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
        yield _parameter(refused.parameter, typer.Option(*refused.names, hidden=True), refused.type)


def _parameter(name: str, declaration: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, declaration],
    )
