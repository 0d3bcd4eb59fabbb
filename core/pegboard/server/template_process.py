"""The process that renders chats: `python -m pegboard.server.template_process PARENT_PID`.

A checkpoint's template is a program that came with the model, and runs on what clients send: here it
can neither stop the server nor take its memory. Messages are msgpack after their length, four bytes
little-endian, on standard input and output.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from pegboard.chat_template import ChatTemplate
from pegboard.errors import RequestError
from pegboard.server.lifeline import die_with_parent, leave_signals_to_parent

MAX_MEMORY = 2**30
"""Bytes of address space."""

MAX_SHOWN = 300
"""Characters of a refusal: templates put into it what they like."""


class Template(msgspec.Struct, frozen=True):
    """What to render with; the first message, answered by an empty `Rendered`."""

    source: str
    special_tokens: dict[str, str]
    where: str


class Chat(msgspec.Struct, frozen=True):
    """A conversation to render.

    Attributes:
        messages: as the template reads them.
        add_generation_prompt: end with the beginning of the assistant's answer.
        max_bytes: most bytes that the text may have.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    max_bytes: int


class Rendered(msgspec.Struct, frozen=True):
    """The text, or why there is none."""

    text: str = ""
    refusal: str | None = None


def main(arguments: Sequence[str]) -> int:
    """Renders until the parent closes standard input."""
    leave_signals_to_parent()
    die_with_parent(int(arguments[0]))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    first = _read(source)
    if first is None:
        return 0
    given = msgspec.msgpack.decode(first, type=Template)
    template = ChatTemplate(given.source, given.special_tokens, where=given.where)
    _write(target, Rendered())
    while (frame := _read(source)) is not None:
        _write(target, _render(template, msgspec.msgpack.decode(frame, type=Chat)))
    return 0


def _render(template: ChatTemplate, chat: Chat) -> Rendered:
    try:
        text = template.render(
            chat.messages, tools=None, add_generation_prompt=chat.add_generation_prompt
        )
        num_bytes = len(text.encode())
    except RequestError as error:
        return Rendered(refusal=error.was[:MAX_SHOWN])
    except UnicodeEncodeError:
        return Rendered(refusal="they hold half of a surrogate pair")
    if num_bytes > chat.max_bytes:
        return Rendered(refusal=f"{num_bytes} bytes of text, more than the context can hold")
    return Rendered(text)


def _read(source: BinaryIO) -> bytes | None:
    """A frame's payload; None at the end."""
    head = source.read(4)
    if len(head) < 4:
        return None
    return source.read(int.from_bytes(head, "little"))


def _write(target: BinaryIO, answer: Rendered) -> None:
    payload = msgspec.msgpack.encode(answer)
    target.write(len(payload).to_bytes(4, "little") + payload)
    target.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
