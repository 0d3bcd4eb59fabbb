"""Chat templates: sandboxed jinja2 with the functions that Hugging Face's templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pegboard.errors import RequestError, TokenizerError


class ChatTemplate:
    """A template, compiled. It is a program that came with a checkpoint: it may take any time and
    memory, and so is made and used in a process of its own (`pegboard.chat.process`).

    Args:
        source: jinja2 source.
        special_tokens: `bos_token`, `eos_token`, ... to their texts; variables of the template.
        where: the checkpoint, for errors.

    Raises:
        TokenizerError: the source is no jinja2 template, or one that cannot be compiled.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, where: str) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # deep nesting, numbers without end: whatever Python raises
            raise TokenizerError(
                f"{where}: chat template", f"is not valid ({_reason(error)})"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        """The prompt of a conversation.

        Raises:
            RequestError: the template refuses the messages, or cannot be rendered with them.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # templates index, add and call what clients send
            raise RequestError(
                "messages", f"the model's chat template refuses them ({_reason(error)})"
            ) from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _reason(error: Exception) -> str:
    """An exception's message, or its name: some, such as MemoryError, have no message."""
    return str(error) or type(error).__name__


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; jinja2's own filter would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
