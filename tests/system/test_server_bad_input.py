"""No input of a client is answered by a 5xx, and the engine's process stays the same."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis.strategies as st
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from pegboard.testing.tiny import write_tiny_model

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}

MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def served(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True, num_hidden_layers=1)
    return serve(model, "--served-model-name", "tiny", "--max-model-len", str(MAX_MODEL_LEN))


@pytest.fixture(scope="module")
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


pytestmark = pytest.mark.usefixtures("the_engine_stays")


def fuzz(num_cases: int) -> settings:
    return settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def check(status: int, content: bytes) -> None:
    """No 5xx; and what is refused is refused in the API's shape."""
    assert status < 500, content
    if status >= 400:
        assert len(content) < 20_000
        error = json.loads(content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and isinstance(error["type"], str)
        assert all(isinstance(error[name], str | None) for name in ("param", "code"))


def run_schemathesis(url: str, http: httpx.Client, num_cases: int) -> None:
    """So many cases for each operation of the schema that the server itself hands out."""
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json")
    paths = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        paths.add(operation.path)
        modes = list(schemathesis.GenerationMode)
        strategy = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])

        @fuzz(num_cases if operation.method.upper() == "POST" else max(num_cases // 20, 5))
        @seed(1)
        @given(case=strategy)
        def send(case: Any) -> None:
            answer = case.call(timeout=60)
            check(answer.status_code, answer.content)

        send()
    assert {COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/models", "/metrics"} <= paths


def test_the_schemas_requests_and_their_mutations(served: Any, http: httpx.Client) -> None:
    run_schemathesis(served.url, http, 12)


@pytest.mark.slow
def test_thousands_of_the_schemas_requests(served: Any, http: httpx.Client) -> None:
    run_schemathesis(served.url, http, 1000)


_NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 0.5, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**63), 10**30]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-3, 700),
)
_TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["", "\0", "\ud800", "👩‍👩‍👧", "<|im_end|>", "a" * 500])
)
_VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)
_TOKEN_IDS = st.lists(st.integers(0, 600), max_size=MAX_MODEL_LEN + 2)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["tiny", "other"]),
    "max_tokens": st.integers(-1, MAX_MODEL_LEN + 1),
    "min_tokens": st.integers(-1, 9),
    "temperature": st.sampled_from([0, 1, 0.01, 100, math.nan]),
    "top_p": st.sampled_from([0, 0.1, 1, 2]),
    "top_k": st.sampled_from([-1, 0, 1, 10**6]),
    "min_p": st.sampled_from([0, 0.5, 1, -1]),
    "repetition_penalty": st.sampled_from([0.1, 1, 1.5, 0]),
    "presence_penalty": st.sampled_from([-2, 0, 2, 3]),
    "frequency_penalty": st.sampled_from([-2, 0, 2, 3]),
    "logit_bias": st.dictionaries(
        st.sampled_from(["0", "5", "600", "x", "-1"]), _NUMBERS, max_size=2
    ),
    "seed": st.integers(-(2**63), 2**64),
    "n": st.integers(0, 3),
    "stop": st.lists(_TEXTS, max_size=5) | _TEXTS,
    "stop_token_ids": _TOKEN_IDS,
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(-1, 21) | st.booleans(),
    "top_logprobs": st.integers(-1, 21),
    "prompt_logprobs": st.integers(-1, 21),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "return_token_ids": st.booleans(),
    "processors": st.dictionaries(st.sampled_from(["penalties", "min_tokens", "?"]), _VALUES),
    "priority": _NUMBERS,
    "tools": st.just([]) | _VALUES,
    "chat_template": st.just("{{ 1 }}"),
}
_PROMPTS = st.one_of(_TEXTS, _TOKEN_IDS, st.lists(_TEXTS | _TOKEN_IDS, max_size=3), _VALUES)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool"]),
            "content": _TEXTS | _VALUES,
        }
    ),
    max_size=3,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path and a body in which most fields have values of the right kind."""
    path = draw(st.sampled_from([COMPLETIONS, COMPLETIONS, CHAT, CHAT, "/tokenize", "/detokenize"]))
    names = draw(st.sets(st.sampled_from(sorted(_FIELDS)), max_size=4))
    body = {
        name: draw(_FIELDS[name] | _VALUES if draw(st.booleans()) else _FIELDS[name])
        for name in names
    }
    main = {
        COMPLETIONS: "prompt",
        CHAT: "messages",
        "/tokenize": "prompt",
        "/detokenize": "tokens",
    }[path]
    body[main] = draw({"prompt": _PROMPTS, "messages": _MESSAGES, "tokens": _TOKEN_IDS}[main])
    if draw(st.booleans()):
        body["max_tokens"] = 3
    return path, body


def run_fuzz(http: httpx.Client, num_cases: int) -> None:
    statuses = set()

    @fuzz(num_cases)
    @seed(2)
    @given(requests())
    def send(request: tuple[str, dict[str, Any]]) -> None:
        path, body = request
        answer = http.post(path, content=json.dumps(body).encode(), headers=JSON)
        statuses.add(answer.status_code)
        check(answer.status_code, answer.content)
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.text.endswith("data: [DONE]\n\n")

    send()
    assert {200, 400} <= statuses


def test_bodies_with_almost_right_values(http: httpx.Client) -> None:
    run_fuzz(http, 200)


@pytest.mark.slow
def test_thousands_of_bodies_with_almost_right_values(http: httpx.Client) -> None:
    run_fuzz(http, 3000)


@pytest.mark.parametrize("num_cases", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_bodies_that_are_no_json(http: httpx.Client, num_cases: int) -> None:
    contents = st.binary(max_size=40) | st.text(max_size=20).map(str.encode)
    paths = st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
    kinds = st.sampled_from([JSON, {}, {"content-type": "text/plain; charset=x"}])

    @fuzz(num_cases)
    @seed(3)
    @given(path=paths, content=contents, kind=kinds)
    def send(path: str, content: bytes, kind: dict[str, str]) -> None:
        answer = http.post(path, content=content, headers=kind)
        assert 400 <= answer.status_code < 500
        check(answer.status_code, answer.content)

    send()
