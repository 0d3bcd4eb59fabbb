"""Settings bound all that a client sends, and a refusal names the one that was passed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from pegboard.config import LimitsConfig
from pegboard.testing.tiny import write_tiny_model

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}

LIMITS = {
    "values": 2000,
    "keys": 300,
    "depth": 8,
    "prompts": 4,
    "n": 6,
    "sequences": 8,
    "messages": 3,
    "parts": 2,
    "name": 20,
    "metadata": 2,
    "metadata_characters": 30,
    "stop": 3,
    "stop_characters": 12,
    "stop_token_ids": 5,
    "logit_bias": 4,
    "processors": 60,
    "queue_tokens": 60,
    "bytes_per_token": 4,
    "echo": 32,
    "logprobs": 12,
    "body": 30_000,
}

pytestmark = pytest.mark.usefixtures("the_engine_stays")


@pytest.fixture(scope="module")
def served(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True, num_hidden_layers=1)
    limits = ", ".join(f"{name}: {limit}" for name, limit in LIMITS.items())
    settings = ("--set", f"server.limits={{{limits}}}", "--max-model-len", "64")
    return serve(model, "--served-model-name", "tiny", *settings)


@pytest.fixture(scope="module")
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": [5], "max_tokens": 1, **fields}


def chat(*contents: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": content} for content in contents or ("a",)]
    return CHAT, {"messages": messages, "max_tokens": 1, **fields}


def parts(number: int) -> list[Any]:
    return [{"type": "text", "text": "a"}] * number


AT_AND_OVER = {
    "prompts": (completion(prompt=[[5]] * 4), completion(prompt=[[5]] * 5)),
    "n": (completion(n=6), completion(n=7)),
    "sequences": (completion(prompt=["a"] * 4, n=2), completion(prompt=["a"] * 3, n=3)),
    "messages": (chat("a", "b", "c"), chat("a", "b", "c", "d")),
    "parts": (chat(parts(2)), chat(parts(3))),
    "name": (completion(user="a" * 20), completion(user="a" * 21)),
    "metadata": (completion(metadata={"a": "", "b": ""}), completion(metadata=dict.fromkeys("abc", ""))),
    "metadata_characters": (
        completion(metadata={"a": "b" * 29}),
        completion(metadata={"a" * 15: "b" * 16}),
    ),
    "stop": (completion(stop=["x"] * 3), completion(stop=["x"] * 4)),
    "stop_characters": (completion(stop=["x" * 6] * 2), chat(stop="x" * 13)),
    "stop_token_ids": (completion(stop_token_ids=[7] * 5), completion(stop_token_ids=[7] * 6)),
    "logit_bias": (
        completion(logit_bias=dict.fromkeys("1234", 1)),
        completion(logit_bias=dict.fromkeys("12345", 1)),
    ),
    "processors": (
        completion(processors={}),
        completion(processors={"penalties": {"a": [[1] * 30]}}),
    ),
    "queue_tokens": (completion(prompt=[5] * 30, n=2), completion(prompt=[5] * 31, n=2)),
    "values": (completion(prompt=[5] * 40), completion(tools=[[1, 2]] * 1000)),
    "keys": (completion(), completion(tools=[{"a": {}}] * 301)),
    "depth": (completion(), completion(tools=[[[[[[[[[]]]]]]]]])),
    "bytes_per_token": (completion(prompt="a b " * 8), completion(prompt="the dog " * 40)),
    "echo": (completion(prompt="a b " * 4, n=2, echo=True), completion(prompt="a b " * 5, n=2, echo=True)),
    "logprobs": (completion(logprobs=2, max_tokens=4), completion(logprobs=2, max_tokens=5)),
    "body": (completion(metadata={"a": "b"}), completion(metadata={"a": "b" * 30_000})),
}  # fmt: skip


def test_every_limit_is_tested() -> None:
    # That of the queue where something waits: see test_server_life.
    assert AT_AND_OVER.keys() | {"queue"} == LimitsConfig.model_fields.keys()


@pytest.mark.parametrize("setting", AT_AND_OVER)
def test_what_is_at_a_limit_is_taken_and_what_is_over_it_is_refused_by_its_name(
    http: httpx.Client, setting: str
) -> None:
    at, over = AT_AND_OVER[setting]
    answer = http.post(at[0], json=at[1])
    assert answer.status_code == 200, answer.text
    answer = http.post(over[0], json=over[1])
    assert answer.status_code == (413 if setting == "body" else 400), answer.text
    assert re.search(rf"\(server\.limits\.{setting}[):]", answer.json()["error"]["message"])


@pytest.mark.parametrize(
    ("setting", "asked"),
    [
        ("logprobs", completion(prompt=[5] * 5, prompt_logprobs=2)),
        ("logprobs", completion(prompt=[5] * 2, n=2, prompt_logprobs=2, logprobs=1)),
        # Nobody knows beforehand how many there will be.
        ("logprobs", chat(logprobs=True, top_logprobs=2, ignore_eos=True, max_tokens=None)),
        ("echo", completion(prompt=[[5, 6], [7]], n=2, return_token_ids=True)),
    ],
)
def test_what_an_answer_repeats_and_shows_is_added_up(
    http: httpx.Client, setting: str, asked: tuple[str, dict[str, Any]]
) -> None:
    path, body = asked
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert re.search(rf"\(server\.limits\.{setting}[):]", answer.json()["error"]["message"])
    assert http.post(path, json={**body, "stream": True, "prompt_logprobs": None}).is_success


@pytest.mark.parametrize("field", ["model", "safety_identifier", "prompt_cache_key", "cache_salt"])
def test_every_name_is_bounded(http: httpx.Client, field: str) -> None:
    for path, body in (completion(**{field: "a" * 21}), chat(**{field: "a" * 21})):
        answer = http.post(path, json=body)
        assert answer.json()["error"]["param"] == field
        assert "server.limits.name" in answer.json()["error"]["message"]


def test_a_message_s_name_is_refused_by_its_place(http: httpx.Client) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "a", "name": "b" * 21},
    ]
    error = http.post(CHAT, json={"messages": messages}).json()["error"]
    assert error["param"] == "messages.1.name"


def test_the_texts_of_a_chat_are_added_up_before_they_are_rendered(http: httpx.Client) -> None:
    path, body = chat(*["a" * 100] * 3)
    error = http.post(path, json=body).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_what_stands_in_texts_is_neither_a_key_nor_a_value(http: httpx.Client) -> None:
    text = '{"a": [1, 2, "\\\\\\"'
    answer = http.post("/tokenize", json={"prompt": text * 12})
    assert answer.status_code == 200, answer.text
    many = ',:[{"' * 3000
    answer = http.post("/tokenize", json={"prompt": many + "\\"})
    assert "server.limits.bytes_per_token" in answer.text, answer.text


def test_no_more_ids_than_the_context_holds_become_text(http: httpx.Client) -> None:
    assert http.post("/detokenize", json={"tokens": [5] * 64}).status_code == 200
    answer = http.post("/detokenize", json={"tokens": [5] * 65})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, '"logit_bias": {"%s": 1}'),
        (COMPLETIONS, '"logit_bias": {"5": %s}'),
        (COMPLETIONS, '"stop_token_ids": [%s]'),
        (COMPLETIONS, '"seed": %s'),
        (COMPLETIONS, '"n": %s'),
        (COMPLETIONS, '"priority": -%s'),
        (COMPLETIONS, '"temperature": 1e%s'),
        (COMPLETIONS, '"top_p": 0.%s'),
        (COMPLETIONS, '"prompt": [%s]'),
        (COMPLETIONS, '"processors": {"penalties": {"%s": %s}}'),
        (COMPLETIONS, '"metadata": {"%s": "a"}'),
        (COMPLETIONS, '"%s": 1'),
        (CHAT, '"messages": [{"role": "user", "content": %s}]'),
        (CHAT, '"top_logprobs": %s'),
        ("/detokenize", '"tokens": [%s]'),
        ("/tokenize", '"add_special_tokens": %s'),
    ],
)
@pytest.mark.parametrize("num_digits", [19, 30, 4000, 5000])
def test_numbers_of_many_digits_are_refused(
    http: httpx.Client, path: str, fields: str, num_digits: int
) -> None:
    number = "9" * num_digits
    given = fields % ((number,) * fields.count("%s"))
    rest = {COMPLETIONS: '"prompt": [5]', CHAT: '"messages": [{"role": "user", "content": "a"}]'}
    if not ("prompt" in given or "messages" in given or path not in rest):
        given = f"{rest[path]}, {given}"
    answer = http.post(path, content=f"{{{given}}}".encode(), headers=JSON)
    # A bias may be as large, and names and seeds may be as long.
    taken = ("seed", "metadata", '{"5"') if num_digits == 19 else ()
    accepted = any(word in fields for word in ("top_p", *taken))
    assert answer.status_code == (200 if accepted else 400), answer.text
    assert len(answer.content) < 5000


def test_null_of_any_key_is_absence(http: httpx.Client) -> None:
    message: dict[str, Any] = {
        "role": "user",
        "content": [{"type": "text", "text": "Hi", "cache": None}],
    }
    message |= {"parsed": None, "tool_calls": None, "anything": None}
    body = {
        "messages": [message],
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "anything": None},
        "response_format": {"type": "text", "json_schema": None},
        "chat_template_kwargs": {"enable_thinking": None},
        "metadata": {"a": None},
        "logit_bias": {"5": None},
        "processors": {"penalties": None},
        "tools": None,
        "anything": None,
    }
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    body = {"prompt": "a", "max_tokens": 1, "messages": None, "suffix": None}
    assert http.post(COMPLETIONS, json=body).status_code == 200


def test_the_client_s_own_messages_are_taken_back(served: Any) -> None:
    asked: Any = [{"role": "user", "content": "Hello"}]
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        given: dict[str, Any] = {"model": "tiny", "logit_bias": {"70": 20}}
        given["extra_body"] = {"stop_token_ids": [70]}
        parsed = client.chat.completions.parse(messages=asked, **given).choices[0].message
        with client.chat.completions.stream(messages=asked, **given) as stream:
            streamed = stream.get_final_completion().choices[0].message
        for message in (parsed, streamed):
            assert "parsed" in message.to_dict(exclude_unset=False)
            turns: tuple[Any, ...] = (message, message.to_dict(exclude_unset=False))
            for turn in turns:
                client.chat.completions.create(messages=[*asked, turn, *asked], **given)
