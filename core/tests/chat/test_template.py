"""Chat templates, against transformers, which they were written for."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pegboard.chat.template import ChatTemplate
from pegboard.errors import RequestError, TokenizerError
from pegboard.interfaces.checkpoint import TokenizerFacts
from pegboard.testing.tiny import write_tiny_tokenizer
from pegboard.tokenizer import load_tokenizer

SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What templates of the larger families do: blocks on lines of their own, tools as JSON, namespaces,
# loop controls, `generation` marks, macros, filters.
ELABORATE = """{{- bos_token }}
{%- macro role(message) %}[{{ message.role | upper }}]{% endmacro %}
{%- set ns = namespace(count=0, seen=[]) %}
{%- if tools %}
    {{- "Tools:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
        {{- "\\n" ~ (tool | tojson) }}
    {%- endfor %}
{%- endif %}
{% for message in messages %}
    {% if message.content is not defined %}
        {% continue %}
    {% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content.strip().split('</think>')[-1] }}
        {%- endgeneration %}
    {%- else %}
{{ role(message) }} {{ message['content'] | trim | replace('<', '&') }} é
    {%- endif %}
    {% if ns.count > 8 %}{% break %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ '[ASSISTANT]' }}{{ eos_token }}{% endif %}
"""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "Wie's <draußen> ist & mehr",
            "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}},
        },
    }
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": '  Be <brief> & "kind".  '},
        {"role": "user", "content": "日本?\n\nline"},
        {"role": "assistant", "content": "<think>hm</think>Yes. "},
        {"role": "user", "content": ""},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": json.dumps({"t": 20})},
    ],
]


@pytest.mark.parametrize("template", [CHATML, ELABORATE], ids=["chatml", "elaborate"])
def test_chats_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    write_tiny_tokenizer(tmp_path)
    file = str(tmp_path / "tokenizer.json")
    theirs: Any = PreTrainedTokenizerFast(tokenizer_file=file, **SPECIAL)  # type: ignore[no-untyped-call]
    facts = TokenizerFacts(file, template, SPECIAL)
    with closing(load_tokenizer(facts, where="here")) as ours:
        for chat in CHATS if template is ELABORATE else CHATS[:2]:
            for tools in (None, TOOLS):
                for add in (True, False):
                    expected = theirs.apply_chat_template(
                        chat,
                        tools=tools,
                        chat_template=template,
                        tokenize=False,
                        add_generation_prompt=add,
                    )
                    rendered = ours.render_chat(chat, tools=tools, add_generation_prompt=add)
                    assert rendered == expected


def render(source: str, messages: list[dict[str, Any]] = CHATS[0]) -> str:
    template = ChatTemplate(source, SPECIAL, where="here")
    return template.render(messages, tools=None, add_generation_prompt=True)


def test_todays_date_is_there_for_templates() -> None:
    before = datetime.now().strftime("%Y-%m-%d")
    rendered = render("{{ strftime_now('%Y-%m-%d') }}")
    assert rendered in (before, datetime.now().strftime("%Y-%m-%d"))


NOT_TEMPLATES = {
    "a tag without its end": "{% for message in %}",
    "thousands of brackets": "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "thousands of lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "thousands of conditions": "{% if messages %}" * 3000 + "{% endif %}" * 3000,
    "thousands of negations": "{{ " + "not " * 9000 + "1 }}",
    "a sum of thousands": "{{ " + "1 + " * 9000 + "1 }}",
    "loops in loops": "{% for a in messages %}" * 60 + "{% endfor %}" * 60,
    "a number of 200,000 digits": "{{ " + "9" * 200_000 + " }}",
    "half of a surrogate pair": "{{ '\ud800' ",
    "a file of its own": "{% include 'other' %}{% nonsense %}",
}


@pytest.mark.parametrize("kind", NOT_TEMPLATES)
def test_what_is_no_template_is_one_line(kind: str) -> None:
    with pytest.raises(TokenizerError, match="here: chat template: is not valid") as caught:
        render(NOT_TEMPLATES[kind])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ messages[0].nothing.more }}",
        "{{ (1).__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ range(10**9) }}",
        "{{ 10 ** (5000 * messages | length) }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% include 'other' %}",
        "{{ messages | tojson(indent=messages) }}",
        "{{ strftime_now(7) }}",
    ],
)
def test_what_a_template_cannot_do_is_an_error_of_the_request(template: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(template)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000
