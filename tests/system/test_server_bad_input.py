"""Whatever a client sends, the answer is never a 5xx, and the engine's process stays the same."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis.strategies as st
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from pegboard.testing.tiny import write_tiny_model

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
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


@pytest.fixture(autouse=True)
def the_engine_stays(served: Any, http: httpx.Client) -> Iterator[None]:
    yield
    assert psutil.Process(served.engine_pid).ppid() == served.process.pid
    assert http.get("/health").status_code == 200
    answer = http.post(COMPLETIONS, json={"prompt": "the dog", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert "Traceback" not in served.log


def fuzz(num_cases: int) -> settings:
    return settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def check(answer: httpx.Response) -> None:
    """No 5xx; and what is refused is refused in the API's shape."""
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.content) < 20_000


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
            assert case.call(timeout=60).status_code < 500

        send()
    assert {COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/models", "/metrics"} <= paths


def test_the_schemas_requests_and_their_mutations(served: Any, http: httpx.Client) -> None:
    run_schemathesis(served.url, http, 30)


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
        check(answer)
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.text.endswith("data: [DONE]\n\n")

    send()
    assert {200, 400} <= statuses


def test_bodies_with_almost_right_values(http: httpx.Client) -> None:
    run_fuzz(http, 200)


@pytest.mark.slow
def test_thousands_of_bodies_with_almost_right_values(http: httpx.Client) -> None:
    run_fuzz(http, 3000)


@fuzz(60)
@seed(3)
@given(content=st.binary(max_size=40) | st.text(max_size=20).map(str.encode), data=st.data())
def test_bodies_that_are_no_json(http: httpx.Client, content: bytes, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]))
    kind = data.draw(st.sampled_from([JSON, {}, {"content-type": "text/plain; charset=x"}]))
    answer = http.post(path, content=content, headers=kind)
    assert 400 <= answer.status_code < 500
    check(answer)


@pytest.fixture
def engine_asleep(served: Any) -> Iterator[None]:
    """The engine's process hears nothing."""
    os.kill(served.engine_pid, signal.SIGSTOP)
    yield
    os.kill(served.engine_pid, signal.SIGCONT)


REFUSED: dict[str, tuple[str, bytes, str | None]] = {
    "no tokens": (COMPLETIONS, b'{"prompt": ""}', "prompt"),
    "as many as the context": (
        COMPLETIONS,
        json.dumps({"prompt": [5] * MAX_MODEL_LEN}).encode(),
        "prompt",
    ),
    "more than the context": (COMPLETIONS, json.dumps({"prompt": [5] * 9999}).encode(), "prompt"),
    "prompt and answer over the context": (
        COMPLETIONS,
        b'{"prompt": [5], "max_tokens": 64}',
        "prompt",
    ),
    "id too large": (COMPLETIONS, b'{"prompt": [517]}', "prompt"),
    "id negative": (COMPLETIONS, b'{"prompt": [-1]}', "prompt"),
    "stop id too large": (
        COMPLETIONS,
        b'{"prompt": [5], "stop_token_ids": [517]}',
        "stop_token_ids",
    ),
    "biased id too large": (
        COMPLETIONS,
        b'{"prompt": [5], "logit_bias": {"517": 1}}',
        "logit_bias",
    ),
    "n of 0": (COMPLETIONS, b'{"prompt": [5], "n": 0}', "n"),
    "n of 10000": (COMPLETIONS, b'{"prompt": [5], "n": 10000}', "n"),
    "too many sequences": (
        COMPLETIONS,
        json.dumps({"prompt": ["a"] * 100, "n": 100}).encode(),
        "n",
    ),
    "temperature of NaN": (COMPLETIONS, b'{"prompt": [5], "temperature": NaN}', None),
    "infinite penalty": (
        COMPLETIONS,
        b'{"prompt": [5], "presence_penalty": 1e300}',
        "presence_penalty",
    ),
    "least over most": (
        COMPLETIONS,
        b'{"prompt": [5], "min_tokens": 4, "max_tokens": 3}',
        "min_tokens",
    ),
    "nothing to generate": (COMPLETIONS, b'{"prompt": [5], "max_tokens": 0}', "max_tokens"),
    "streamed prompt logprobs": (
        COMPLETIONS,
        b'{"prompt": [5], "prompt_logprobs": 1, "stream": true}',
        "prompt_logprobs",
    ),
    "deep lists": (COMPLETIONS, b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", None),
    "deep objects": (CHAT, b'{"messages": ' + b'{"a": ' * 50_000 + b"1" + b"}" * 50_001, None),
    "a number of many digits": (
        COMPLETIONS,
        b'{"prompt": [5], "seed": ' + b"9" * 9000 + b"}",
        None,
    ),
    "its own template": (
        CHAT,
        json.dumps({"messages": HELLO, "chat_template": "{{ 1 }}"}).encode(),
        "chat_template",
    ),
    "a text that cannot fit": (
        COMPLETIONS,
        json.dumps({"prompt": "a" * 100_000}).encode(),
        "prompt",
    ),
    "a message that cannot fit": (
        CHAT,
        json.dumps({"messages": [{"role": "user", "content": "a" * 100_000}]}).encode(),
        "messages",
    ),
}


@pytest.mark.usefixtures("engine_asleep")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_at_once_and_the_engine_never_hears_of_it(
    http: httpx.Client, case: str
) -> None:
    path, content, param = REFUSED[case]
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        answer = http.post(path, content=content, headers=JSON)
        seconds.append(time.perf_counter() - began)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param, error
    # 5 ms on a machine of one's own; ten times that where others compute.
    assert min(seconds) < 0.05


def test_a_body_of_50_megabytes_is_not_read(served: Any, http: httpx.Client) -> None:
    before = psutil.Process(served.process.pid).memory_info().rss
    began = time.perf_counter()
    answer = http.post(COMPLETIONS, content=b"[" * 50_000_000, headers=JSON)
    assert answer.status_code == 413
    assert time.perf_counter() - began < 2
    assert psutil.Process(served.process.pid).memory_info().rss - before < 20e6
