"""Every error has the API's shape, and names the field that it is about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError

from pegboard.testing.tiny import write_tiny_model

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def served(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True, num_hidden_layers=1)
    limits = "server.limits={n: 4, stop: 4, prompts: 3, body: 64KiB}"
    return serve(model, "--served-model-name", "tiny", "--max-model-len", "64", "--set", limits)


@pytest.fixture(scope="module")
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETIONS, {}, 400, "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [517, -1]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [517]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 4}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 64}, 400, "prompt"),
        (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "model"),
        (COMPLETIONS, {"prompt": "a", "temprature": 1}, 400, "temprature"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, 400, "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p"),
        (COMPLETIONS, {"prompt": "a", "n": 5}, 400, "n"),
        (COMPLETIONS, {"prompt": "a", "stop": ["b"] * 5}, 400, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": ""}, 400, "stop"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**64}, 400, "seed"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"517": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, 400, "best_of"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"x": 1}}, 400, "stream_options.x"),
        (COMPLETIONS, {"prompt": "a", "processors": {"nope": {}}}, 400, "processors.nope"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "bot", "content": "a"}]}, 400, "messages.0.role"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools"),
        (
            CHAT,
            {"messages": HELLO, "response_format": {"type": "json_object"}},
            400,
            "response_format",
        ),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        (CHAT, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, 400, "max_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    for stream in (False, True):
        answer = http.post(path, json={**body, "stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), error
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert "\n" not in error["message"]


def test_fields_that_ask_for_nothing_are_accepted(http: httpx.Client) -> None:
    harmless = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "user": "me",
        "logit_bias": None,
        "stop": None,
        "parallel_tool_calls": True,
    }
    answer = http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, **harmless})
    assert answer.status_code == 200, answer.text


def test_options_of_streams_need_a_stream(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "a", "stream_options": {"include_usage": True}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


def test_the_nearest_known_field_is_named(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "a", "temprature": 1})
    assert "did you mean temperature?" in answer.json()["error"]["message"]


def test_a_context_overflow_is_told_as_clients_expect(served: Any) -> None:
    with (
        served.client() as client,
        pytest.raises(BadRequestError, match="maximum context length is 64") as caught,
    ):
        client.completions.create(model="tiny", prompt=[5] * 70, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/nothing/here", b"", 404),
        ("GET", COMPLETIONS, b"", 405),
        ("POST", COMPLETIONS, b"{", 400),
        ("POST", COMPLETIONS, b"[1]", 400),
        ("POST", COMPLETIONS, b'{"prompt": "\\ud800"}', 400),
        ("POST", COMPLETIONS, b'{"prompt": "' + b"a" * 70_000 + b'"}', 413),
    ],
)
def test_every_error_has_the_shape_of_the_api(
    http: httpx.Client, method: str, path: str, content: bytes, status: int
) -> None:
    headers = {"content-type": "application/json"}
    answer = http.request(method, path, content=content, headers=headers)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_without_a_stated_length_is_limited_too(http: httpx.Client) -> None:
    pieces = (b"a" * 1000 for _ in range(70))
    answer = http.post(COMPLETIONS, content=pieces, headers={"content-type": "application/json"})
    assert answer.status_code == 413
