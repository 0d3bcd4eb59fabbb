"""Chats rendered in a process of their own: whatever a template does, its caller goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psutil
import pytest

from pegboard.chat import process
from pegboard.chat.renderer import ChatRenderer
from pegboard.chat.template import ChatTemplate
from pegboard.errors import RequestError, TokenizerError

HELLO = [{"role": "user", "content": "Grüße 😀"}]
ECHO = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ON_WORD = (
    "{{ messages[0].content }}{% if messages[0].content == 'loop' %}"
    + ENDLESS
    + "{% elif messages[0].content == 'power' %}{{ 3 ** (3 ** (30 * messages | length)) }}"
    + "{% elif messages[0].content == 'grow' %}{{ 'a' * 10 ** 10 }}"
    + "{% elif messages[0].content == 'double' %}{% set ns = namespace(t='aa') %}"
    + "{% for a in range(99) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}"
    + "{% elif messages[0].content == 'long' %}{% for a in range(99999) %}{{ 'a' * 9 }}{% endfor %}"
    + "{% endif %}"
)


def processes() -> list[psutil.Process]:
    """Those that render for this one, which may have children of other tests."""
    return [child for child in psutil.Process().children() if process.__name__ in child.cmdline()]


@contextmanager
def renderer_of(source: str, **limits: float) -> Iterator[ChatRenderer]:
    with closing(ChatRenderer(source, {"bos_token": "<s>"}, where="here", **limits)) as renderer:
        yield renderer
    assert not processes(), "a process was left behind"


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_chat_is_rendered_as_in_this_process() -> None:
    with renderer_of(ECHO) as renderer:
        template = ChatTemplate(ECHO, {"bos_token": "<s>"}, where="here")
        expected = template.render(HELLO, tools=None, add_generation_prompt=True)
        found: list[str] = []
        threads = [
            threading.Thread(target=lambda: found.append(renderer.render(HELLO))) for _ in range(9)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [expected] * 9
        long = says("x" * 300_000)
        assert len(renderer.render(long)) > 300_000


def test_a_text_over_the_limit_is_refused() -> None:
    with renderer_of(ECHO) as renderer, pytest.raises(RequestError, match="more than the context"):
        renderer.render(says("x" * 101), max_bytes=100)


def test_what_the_template_says_is_told_and_cut_short() -> None:
    source = "{{ raise_exception('roles must alternate' ~ 'x' * 9999) }}"
    with renderer_of(source) as renderer, pytest.raises(RequestError) as caught:
        renderer.render(HELLO)
    assert caught.value.param == "messages"
    assert "roles must alternate" in str(caught.value) and len(str(caught.value)) < 500


def test_a_template_that_takes_too_much_is_stopped_and_the_next_chat_is_rendered() -> None:
    with renderer_of(ON_WORD, render_s=1.0) as renderer:
        for word, message in (
            ("loop", "over 1 s"),
            ("power", "over 1 s"),
            ("grow", "refuses|ends|over 1 s"),
            ("double", "refuses|ends|over 1 s"),
            ("long", "more than the context"),
        ):
            began = time.monotonic()
            with pytest.raises(RequestError, match=message):
                renderer.render(says(word), max_bytes=100)
            assert time.monotonic() - began < 30
            assert renderer.render(says("hello"), max_bytes=100) == "hello"


UNUSABLE = {
    "endless": (ENDLESS, "takes over 1 s for a short chat"),
    "endless before it is rendered": ("{{ 3 ** (3 ** 30) }}", "takes over 1 s for a short chat"),
    "no template": ("{% for %}", "is not valid"),
    "silent": ("{{ messages | length }}", "leaves out what a user says"),
    "thousands of brackets": ("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "is not valid"),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow) if kind.startswith("endless before") else kind
        for kind in UNUSABLE
    ],
)
def test_a_template_that_cannot_be_used_is_found_out_at_once(kind: str) -> None:
    source, message = UNUSABLE[kind]
    with renderer_of(source, compile_s=1.0) as renderer:
        for use in (renderer.check, lambda: renderer.render(HELLO)):
            with pytest.raises(TokenizerError, match=f"here: chat template: {message}.*; fix: "):
                use()


def test_contents_are_given_in_parts_where_parts_are_read() -> None:
    with renderer_of("{{ messages[0]['content'][0]['text'] }}!") as renderer:
        assert renderer.check() == ("system", "user")
        assert renderer.render(HELLO) == "Grüße 😀!"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "half \ud800"},
        {"role": "user", "content": object()},
        {"role": "user", "content": 2**70},
        {7: "user"},
    ],
)
def test_messages_that_cannot_be_given_to_a_template_are_refused(message: dict[Any, Any]) -> None:
    with renderer_of(ECHO) as renderer:
        with pytest.raises(RequestError, match="messages: "):
            renderer.render([message])
        deep: Any = "x"
        for _ in range(5000):
            deep = [deep]
        with pytest.raises(RequestError, match="messages: "):
            renderer.render([{"role": "user", "content": deep}])
        assert renderer.render(HELLO)


def test_a_process_that_was_ended_is_started_anew() -> None:
    with renderer_of(ECHO) as renderer:
        expected = renderer.render(HELLO)
        (child,) = processes()
        child.kill()
        assert renderer.render(HELLO) == expected
        threading.Thread(target=renderer.close).start()
        assert renderer.render(HELLO) == expected


def test_it_outlives_the_thread_that_it_was_first_used_in() -> None:
    with renderer_of(ECHO) as renderer:
        thread = threading.Thread(target=renderer.check)
        thread.start()
        thread.join()
        assert renderer.render(HELLO)


def test_the_process_knows_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGBOARD_API_KEY", "hunter2")
    with renderer_of(ECHO) as renderer:
        renderer.check()
        (child,) = processes()
        assert "PEGBOARD_API_KEY" not in child.environ()
