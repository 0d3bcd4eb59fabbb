"""Chats rendered in a process of their own: whatever a template does, the server goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from pegboard.chat_template import ChatTemplate
from pegboard.errors import RequestError
from pegboard.server import template_process
from pegboard.server.chat_renderer import ChatRenderer

HELLO = [{"role": "user", "content": "Grüße 😀"}]
ECHO = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

LOOP = (
    "{% if messages[0].content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}done"
)
GROW = "{% if messages[0].content == 'grow' %}{{ 'a' * 10**10 }}{% endif %}done"


def renderers() -> list[psutil.Process]:
    """The processes that render for this one, which may have children of other tests."""
    children = psutil.Process().children()
    return [child for child in children if template_process.__name__ in child.cmdline()]


def run(
    source: str, use: Callable[[ChatRenderer], Awaitable[None]], render_s: float = 20.0
) -> None:
    async def run() -> None:
        template = ChatTemplate(source, {"bos_token": "<s>"}, where="here")
        renderer = ChatRenderer(template, "here", render_s)
        renderer.start()
        try:
            await use(renderer)
        finally:
            await renderer.stop()
        assert not renderers(), "a process was left behind"

    asyncio.run(run())


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_chat_is_rendered_as_in_this_process() -> None:
    async def use(renderer: ChatRenderer) -> None:
        template = ChatTemplate(ECHO, {"bos_token": "<s>"}, where="here")
        expected = template.render(HELLO, tools=None, add_generation_prompt=True)
        found = await asyncio.gather(*(renderer.render(HELLO, max_bytes=100) for _ in range(20)))
        assert set(found) == {expected}
        assert len(renderers()) == 1
        long = says("x" * 300_000)
        assert len(await renderer.render(long, max_bytes=10**6)) > 300_000

    run(ECHO, use)


def test_a_text_over_the_limit_is_refused() -> None:
    async def use(renderer: ChatRenderer) -> None:
        with pytest.raises(RequestError, match="more than the context can hold"):
            await renderer.render(says("x" * 101), max_bytes=100)

    run(ECHO, use)


def test_what_the_template_says_is_told_and_cut_short() -> None:
    async def use(renderer: ChatRenderer) -> None:
        with pytest.raises(RequestError, match="roles must alternate") as caught:
            await renderer.render(HELLO, max_bytes=100)
        assert caught.value.param == "messages"
        assert len(str(caught.value)) < 500

    run("{{ raise_exception('roles must alternate' ~ 'x' * 9999) }}", use)


@pytest.mark.parametrize(
    ("source", "word", "message"), [(LOOP, "loop", "over 1 s"), (GROW, "grow", "refuses|ends")]
)
def test_a_template_that_takes_too_much_is_stopped_and_the_next_chat_is_rendered(
    source: str, word: str, message: str
) -> None:
    async def use(renderer: ChatRenderer) -> None:
        began = time.monotonic()
        with pytest.raises(RequestError, match=message):
            await renderer.render(says(word), max_bytes=100)
        assert time.monotonic() - began < 30
        assert await renderer.render(says("hello"), max_bytes=100) == "done"

    run(source, use, render_s=1.0)


def test_a_process_that_dies_is_started_anew() -> None:
    async def use(renderer: ChatRenderer) -> None:
        await renderer.render(HELLO, max_bytes=100)
        renderers()[0].kill()
        with pytest.raises(RequestError):
            await renderer.render(HELLO, max_bytes=100)
        assert await renderer.render(HELLO, max_bytes=100)

    run(ECHO, use)


def test_a_caller_that_leaves_does_not_disturb_the_next() -> None:
    async def use(renderer: ChatRenderer) -> None:
        await renderer.render(HELLO, max_bytes=100)
        for text in map(str, range(20)):
            leaving = asyncio.ensure_future(renderer.render(says(text), max_bytes=100))
            await asyncio.sleep(0)
            leaving.cancel()
            assert text + "!" in await renderer.render(says(text + "!"), max_bytes=100)

    run(ECHO, use)
