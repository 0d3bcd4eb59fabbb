"""Requests that cannot be honoured are refused in milliseconds, and the engine never hears of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from pegboard.testing.tiny import write_tiny_model

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
JSON = {"content-type": "application/json"}
KEY = {"authorization": "Bearer secret"}

MAX_MODEL_LEN = 64

REFUSED_S = 0.005
"""A refusal's time: half of 30 requests on one connection take less."""

pytestmark = [pytest.mark.timing, pytest.mark.usefixtures("the_engine_stays")]


@pytest.fixture(scope="module")
def served(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True, num_hidden_layers=1)
    names = ("--served-model-name", "tiny", "--api-key", "secret")
    return serve(model, *names, "--max-model-len", str(MAX_MODEL_LEN))


@pytest.fixture(scope="module")
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60, headers=KEY) as http:
        yield http


@pytest.fixture
def engine_asleep(served: Any, the_engine_stays: None) -> Iterator[None]:
    """The engine's process hears nothing; it is awake again when it is asked whether it lives."""
    os.kill(served.engine_pid, signal.SIGSTOP)
    yield
    os.kill(served.engine_pid, signal.SIGCONT)


@dataclass(frozen=True)
class Bad:
    """A request that is refused.

    Attributes:
        param: the field that the refusal names.
    """

    content: bytes
    param: str | None = None
    path: str = COMPLETIONS
    status: int = 400
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = tuple((JSON | KEY).items())


def bad(param: str | None, path: str = COMPLETIONS, status: int = 400, /, **fields: Any) -> Bad:
    if path == COMPLETIONS:
        fields = {"prompt": [5]} | fields
    return Bad(json.dumps(fields).encode(), param, path, status)


NESTED = 50_000

REFUSED: dict[str, Bad] = {
    "no tokens": bad("prompt", prompt=""),
    "as many as the context": bad("prompt", prompt=[5] * MAX_MODEL_LEN),
    "more than the context": bad("prompt", prompt=[5] * 9999),
    "id too large": bad("prompt", prompt=[517]),
    "id negative": bad("prompt", prompt=[-1]),
    "stop id too large": bad("stop_token_ids", stop_token_ids=[517]),
    "biased id too large": bad("logit_bias", logit_bias={"517": 1}),
    "n of 0": bad("n", n=0),
    "n of 10000": bad("n", n=10_000),
    "too many sequences": bad("n", prompt=["a"] * 100, n=100),
    "temperature of NaN": bad(None, temperature=float("nan")),
    "infinite penalty": bad("presence_penalty", presence_penalty=1e300),
    "least over most": bad("min_tokens", min_tokens=4, max_tokens=3),
    "nothing to generate": bad("max_tokens", max_tokens=0),
    "streamed prompt logprobs": bad("prompt_logprobs", prompt_logprobs=1, stream=True),
    "another model": bad("model", COMPLETIONS, 404, model="other"),
    "a field nobody knows": bad("temprature", temprature=1),
    "a field not honoured": bad("suffix", suffix="end"),
    "a text for a number": bad("max_tokens", max_tokens="3"),
    "its own template": bad("chat_template", CHAT, messages=HELLO, chat_template="{{ 1 }}"),
    "no messages": bad("messages", CHAT, messages=[]),
    "no such role": bad("messages.0.role", CHAT, messages=[{"role": "x", "content": "a"}]),
    "a text that cannot fit": bad("prompt", prompt="a" * 100_000),
    "a message that cannot fit": bad(
        "messages", CHAT, messages=[{"role": "user", "content": "a" * 100_000}]
    ),
    "nothing to tokenize": bad("prompt", "/tokenize"),
    "ids to detokenize too large": bad("tokens", "/detokenize", tokens=[517]),
    "no JSON": Bad(b"{"),
    "JSON by another name": Bad(b'{"prompt": [5]}', headers=tuple(KEY.items())),
    "deep lists": Bad(b'{"prompt": ' + b"[" * NESTED + b"]" * NESTED + b"}"),
    "deep objects": Bad(
        b'{"messages": ' + b'{"a": ' * NESTED + b"1" + b"}" * (NESTED + 1), None, CHAT
    ),
    "a priority of 81 bits": bad("priority", priority=2**80),
    "a processor's number of 81 bits": bad("processors", processors={"penalties": {"a": 2**80}}),
    "a number of many digits": Bad(b'{"prompt": [5], "seed": ' + b"9" * 9000 + b"}"),
    "no such route": Bad(b"", None, "/v1/nothing", 404),
    "no such method": Bad(b"", None, COMPLETIONS, 405, "PUT"),
    "no key": Bad(b'{"prompt": [5]}', None, COMPLETIONS, 401, headers=tuple(JSON.items())),
}


@pytest.mark.usefixtures("engine_asleep")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_at_once_and_the_engine_never_hears_of_it(
    served: Any, own_time: Any, case: str
) -> None:
    sent = REFUSED[case]
    seconds = []
    with httpx.Client(base_url=served.url, timeout=60) as http:
        message = http.build_request(
            sent.method, sent.path, content=sent.content, headers=list(sent.headers)
        )
        for _ in range(30):
            time_taken = own_time(served.process.pid)
            answer = http.send(message)
            seconds.append(time_taken.seconds())
            assert answer.status_code == sent.status, answer.text
            error = answer.json()["error"]
            assert error["param"] == sent.param, error
    assert statistics.median(seconds) < REFUSED_S


def test_a_body_of_50_megabytes_is_not_read(served: Any, http: httpx.Client) -> None:
    before = psutil.Process(served.process.pid).memory_info().rss
    began = time.perf_counter()
    answer = http.post(COMPLETIONS, content=b"[" * 50_000_000, headers=JSON)
    assert answer.status_code == 413
    # Nearly all of it is the sending, to the end, by a client that reads its answer only then.
    assert time.perf_counter() - began < 2
    assert psutil.Process(served.process.pid).memory_info().rss - before < 20e6


def test_a_body_of_50_megabytes_is_refused_before_it_comes(served: Any, own_time: Any) -> None:
    where = httpx.URL(served.url)
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n"
        "content-type: application/json\r\ncontent-length: 50000000\r\n\r\n"
    ).encode()
    seconds = []
    for _ in range(30):
        with socket.create_connection((where.host, where.port or 80)) as connection:
            connection.settimeout(20)
            time_taken = own_time(served.process.pid)
            connection.sendall(head)
            answer = connection.recv(2**16)
            seconds.append(time_taken.seconds())
            assert answer.startswith(b"HTTP/1.1 413 ")
    assert statistics.median(seconds) < REFUSED_S
