"""The process that renders chats: `python -m pegboard.chat.process PARENT_PID`.

A checkpoint's template is a program that came with the model and runs on texts of clients. In this
process it can neither stop its parent nor take its memory. Messages are msgpack after their length, four
bytes little-endian, on standard input and output.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Sequence
from typing import IO, Any

import msgspec

from pegboard.chat.content import ContentForms, find_forms
from pegboard.chat.template import ChatTemplate
from pegboard.errors import RequestError, TokenizerError
from pegboard.lifeline import die_with_parent, leave_signals_to_parent

MAX_MEMORY = 2**30
"""Bytes of address space."""

MAX_SHOWN = 300
"""Characters of a refusal, whose text is the template's."""


class Template(msgspec.Struct, frozen=True, tag="template"):
    """The template to render with, the first message. A template that cannot be used is refused."""

    source: str
    special_tokens: dict[str, str]
    where: str


class Chat(msgspec.Struct, frozen=True, tag="chat"):
    """A conversation to render.

    Attributes:
        messages: as the template reads them.
        tools: JSON schemas of functions.
        add_generation_prompt: end with the beginning of the assistant's answer.
        max_bytes: most bytes that the text may have.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    max_bytes: int


class Rendered(msgspec.Struct, frozen=True):
    """The text, or why there is none.

    Attributes:
        text: the prompt; "" in answer to `Template`.
        refusal: why it cannot be had.
        fix: of a template that cannot be used.
        reads_parts: in answer to `Template`, roles whose contents must be lists of parts.
    """

    text: str = ""
    refusal: str | None = None
    fix: str = ""
    reads_parts: tuple[str, ...] = ()


def main(arguments: Sequence[str]) -> int:
    """Renders until the parent closes standard input."""
    leave_signals_to_parent()
    die_with_parent(int(arguments[0]))
    with contextlib.suppress(ValueError, OSError):  # there are systems without this limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    _say(target, Rendered())
    first = read_frame(source)
    if first is None:
        return 0
    given = msgspec.msgpack.decode(first, type=Template)
    try:
        template = ChatTemplate(given.source, given.special_tokens, where=given.where)
        forms = find_forms(template, given.where)
    except TokenizerError as error:
        _say(target, Rendered(refusal=error.was[:MAX_SHOWN], fix=error.fix))
        return 0
    _say(target, Rendered(reads_parts=tuple(sorted(forms.parts - forms.text))))
    while (frame := read_frame(source)) is not None:
        _say(target, _answer(template, forms, frame))
    return 0


def _answer(template: ChatTemplate, forms: ContentForms, frame: bytes) -> Rendered:
    try:
        chat = msgspec.msgpack.decode(frame, type=Chat)
    except (msgspec.ValidationError, RecursionError) as error:
        return Rendered(refusal=f"cannot be read ({error})"[:MAX_SHOWN])
    messages = [forms.shape(message) for message in chat.messages]
    try:
        text = template.render(
            messages, tools=chat.tools, add_generation_prompt=chat.add_generation_prompt
        )
        num_bytes = len(text.encode())
    except RequestError as error:
        return Rendered(refusal=error.was[:MAX_SHOWN])
    except UnicodeEncodeError:
        return Rendered(refusal="they hold half of a surrogate pair")
    if num_bytes > chat.max_bytes:
        return Rendered(refusal=f"{num_bytes} bytes of text, more than the context can hold")
    return Rendered(text)


def _say(target: IO[bytes], answer: Rendered) -> None:
    write_frame(target, msgspec.msgpack.encode(answer))


def read_frame(source: IO[bytes]) -> bytes | None:
    """A frame's payload; None: the stream has ended."""
    num_bytes = int.from_bytes(source.read(4), "little")
    payload = source.read(num_bytes)
    return payload if payload and len(payload) == num_bytes else None


def write_frame(target: IO[bytes], payload: bytes) -> None:
    """Raises OSError when nobody reads any more."""
    target.write(len(payload).to_bytes(4, "little"))
    target.write(payload)
    target.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
