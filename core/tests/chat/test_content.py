"""Which form of a message's content a template keeps, against transformers' rendering of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard.chat.content import find_forms
from pegboard.chat.template import ChatTemplate
from pegboard.errors import TokenizerError
from pegboard.testing.tiny import write_tiny_tokenizer

AS_TEXT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
FIRST_PART = "{% for m in messages %}[{{ m.role }}]{{ m['content'][0]['text'] }}{% endfor %}"
ALL_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{% if part['type'] == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
SELECTED = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}"
    "{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
STRICT_PARTS = "{% if messages[0].content is string %}{{ raise_exception('no') }}{% endif %}"
USER_IN_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}{{ m.content[0].text }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
NEEDS_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    + AS_TEXT
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ALL_PARTS
)
SHOUTS = "{% for m in messages %}{{ m.content | upper | trim }}{% endfor %}"

CHAT = [
    {"role": "user", "content": "the dog"},
    {"role": "assistant", "content": "and"},
    {"role": "user", "content": "the fox"},
]


def parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def in_form(chat: list[dict[str, Any]], roles: set[str]) -> list[dict[str, Any]]:
    return [m | {"content": parts(m["content"])} if m["role"] in roles else m for m in chat]


KEPT: dict[str, tuple[str, set[str]]] = {
    "text": (AS_TEXT, set()),
    "the first part": (FIRST_PART, {"user", "assistant", "system"}),
    "all parts": (ALL_PARTS, {"user", "assistant", "system"}),
    "parts chosen": (SELECTED, {"user", "assistant", "system"}),
    "either": (EITHER, set()),
    "parts or an error": (STRICT_PARTS + ALL_PARTS, {"user", "assistant", "system"}),
    "the user's alone in parts": (USER_IN_PARTS, {"user"}),
    "a system message first": (NEEDS_SYSTEM, set()),
    "no system message": (NO_SYSTEM, {"user", "assistant"}),
    "capitals": (SHOUTS, set()),
}


@pytest.mark.parametrize("kind", KEPT)
def test_contents_are_given_in_the_form_that_the_template_keeps(tmp_path: Path, kind: str) -> None:
    from transformers import PreTrainedTokenizerFast

    source, in_parts = KEPT[kind]
    write_tiny_tokenizer(tmp_path)
    theirs: Any = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))  # type: ignore[no-untyped-call]
    template = ChatTemplate(source, {}, where="here")
    forms = find_forms(template, "here")
    assert forms.parts - forms.text == in_parts
    chat = (
        [{"role": "system", "content": "Be kind"}, *CHAT]
        if source is KEPT["a system message first"][0]
        else CHAT
    )
    expected = theirs.apply_chat_template(
        in_form(chat, in_parts), chat_template=source, tokenize=False
    )
    for given in (chat, in_form(chat, {"user", "assistant", "system"})):
        shaped = [forms.shape(message) for message in given]
        assert template.render(shaped, tools=None, add_generation_prompt=False) == expected
    assert "fox" in expected.casefold()


def test_several_texts_stand_on_lines_of_their_own_where_one_is_wanted() -> None:
    several = [{"role": "user", "content": parts("the dog") + parts("the fox")}]
    for source, expected in ((AS_TEXT, "[user]the dog\nthe fox"), (EITHER, "[user]the dogthe fox")):
        template = ChatTemplate(source, {}, where="here")
        forms = find_forms(template, "here")
        shaped = [forms.shape(message) for message in several]
        assert template.render(shaped, tools=None, add_generation_prompt=False) == expected


def test_contents_that_are_neither_are_left_to_the_template() -> None:
    forms = find_forms(ChatTemplate(AS_TEXT, {}, where="here"), "here")
    for content in ([{"type": "image"}], [], None, 7, [{"type": "text", "text": None}]):
        message = {"role": "user", "content": content}
        if content != []:
            assert forms.shape(message) == message
    assert forms.shape({"role": "tool"}) == {"role": "tool"}


@pytest.mark.parametrize(
    "source",
    [
        "",
        "{{ messages | length }}",
        "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{{ messages[0]['content'][1]['text'] }}",
        "{% for m in messages %}{{ m.contents }}{{ m.content[0].txt }}{% endfor %}",
    ],
)
def test_a_template_that_leaves_out_the_users_text_is_refused(source: str) -> None:
    with pytest.raises(
        TokenizerError, match=r"here: chat template: leaves out what a user says.*fix"
    ):
        find_forms(ChatTemplate(source, {}, where="here"), "here")


def test_a_template_that_refuses_every_chat_says_so_of_each() -> None:
    template = ChatTemplate("{{ raise_exception('not today') }}", {}, where="here")
    assert find_forms(template, "here").text == {"user"}
