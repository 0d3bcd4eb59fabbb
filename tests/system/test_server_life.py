"""The life of a server and its engine: nothing left behind, no answer that only looks whole."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import APIError, AuthenticationError
from openai.types import Completion

from pegboard.testing.tiny import write_tiny_model

WaitUntil = Callable[..., None]

WITHOUT_END = {"ignore_eos": True, "return_token_ids": True}
"""An answer that goes on, and a chunk for every token, whether or not it has a text."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small enough to start at once, with a context long enough to be interrupted in."""
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, tokenizer=True, max_position_embeddings=20_000)


def long_stream(served: Any, model: Path, max_tokens: int = 15_000) -> Iterator[Completion]:
    """A stream whose first chunk has come."""
    stream: Iterator[Completion] = served.stream_completion(
        model=str(model),
        prompt=[5, 6, 7],
        max_tokens=max_tokens,
        extra_body=WITHOUT_END,
    )
    next(stream)
    return stream


@pytest.mark.slow
def test_sigterm_lets_open_answers_finish(serve: Any, model: Path) -> None:
    served = serve(model)
    engine = psutil.Process(served.engine_pid)
    stream = long_stream(served, model, max_tokens=300)
    # A terminal or a service manager signals the engine's process as well.
    engine.send_signal(signal.SIGINT)
    engine.send_signal(signal.SIGTERM)
    served.process.send_signal(signal.SIGTERM)
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert served.process.wait(20) == 0
    assert not engine.is_running()
    assert not served.left_behind


def test_a_second_signal_ends_open_answers_with_an_error(
    serve: Any, model: Path, wait_until: WaitUntil
) -> None:
    served = serve(model)
    stream = long_stream(served, model)
    served.process.send_signal(signal.SIGINT)
    wait_until(lambda: "shutting down" in served.log)
    served.process.send_signal(signal.SIGINT)
    with pytest.raises(APIError, match="shutting down"):
        list(stream)
    assert served.process.wait(20) == 0


@pytest.mark.slow
def test_the_death_of_the_engine_never_looks_like_an_answer(serve: Any, model: Path) -> None:
    served = serve(model, "--set", "server.farewell_s=0")
    stream = long_stream(served, model)
    os.kill(served.engine_pid, signal.SIGKILL)
    with pytest.raises(APIError, match="engine"):
        list(stream)
    assert served.process.wait(20) == 1


@pytest.mark.slow
def test_the_engine_dies_with_its_server(serve: Any, model: Path, wait_until: WaitUntil) -> None:
    served = serve(model)
    engine = psutil.Process(served.engine_pid)
    assert "torch" not in Path(f"/proc/{served.process.pid}/maps").read_text()
    served.process.kill()
    served.process.wait()
    wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.slow
def test_keys_of_the_environment_count_and_go_no_further(
    serve: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEGBOARD_API_KEY", "one,schlüssel")
    monkeypatch.setenv("PEGBOARD_ADMIN_KEY", "boss")
    served = serve(model)
    url = served.url + "/v1/models"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"authorization": "Bearer one"}).status_code == 200
    other = "Bearer schlüssel".encode()
    assert httpx.get(url, headers=[(b"authorization", other)]).status_code == 200
    metrics = served.url + "/metrics"
    assert httpx.get(metrics, headers={"authorization": "Bearer one"}).status_code == 403
    assert httpx.get(metrics, headers={"authorization": "Bearer boss"}).status_code == 200
    environment = psutil.Process(served.engine_pid).environ()
    assert not {"PEGBOARD_API_KEY", "PEGBOARD_ADMIN_KEY"} & set(environment)


@pytest.mark.slow
def test_keys_are_asked_for_where_they_are_set(serve: Any, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsecond\n")
    admins = tmp_path / "admins"
    admins.write_text("boss\n")
    given = ("--api-key", "first", "--api-key", f"file:{file}")
    served = serve(model, *given, "--set", f"server.admin_keys=file:{admins}")
    assert "boss" not in served.log
    assert "second" not in " ".join(psutil.Process(served.process.pid).cmdline())
    for path in ("/v1/models", "/metrics", "/nothing", "/openapi.json", "/tokenize", "//health"):
        answer = httpx.get(served.url + path)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/ready", "/live"):
        assert httpx.get(served.url + path).status_code == 200
    reset = f"{served.url}/reset_prefix_cache"
    for key, status in (("first", 403), ("second", 403), ("boss", 200)):
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.get(f"{served.url}/metrics", headers=headers).status_code == status
        assert httpx.post(reset, headers=headers).status_code == status
    for key in ("first", "second", "boss"):
        with served.client(key) as client:
            assert len(client.models.list().data) == 1
        assert httpx.get(served.url + "/v1/models", headers={"x-api-key": key}).status_code == 200
    with served.client("third") as client, pytest.raises(AuthenticationError):
        client.models.list()


@pytest.mark.slow
def test_a_full_queue_is_told_with_a_time_to_come_back(
    serve: Any, model: Path, wait_until: WaitUntil
) -> None:
    limits = "server.limits={queue: 2, queue_tokens: 3}"
    served = serve(model, "--max-num-seqs", "1", "--set", limits)
    url = f"{served.url}/v1/completions"
    body = {"prompt": [5, 6], "max_tokens": 15_000, "stream": True, **WITHOUT_END}

    def ask(**fields: Any) -> httpx.Response:
        return httpx.post(url, json={**body, **fields}, timeout=2)

    with httpx.stream("POST", url, json=body) as running, _post_unread(url, body):
        lines = running.iter_lines()
        next(lines)
        wait_until(lambda: ask().status_code == 503)
        later = {"queue": ask(prompt=[5], n=2), "queue_tokens": ask()}
        never = {"queue": ask(prompt=[5], n=3), "queue_tokens": ask(prompt=[5] * 4)}
    for setting, refused in later.items():
        assert refused.status_code == 503 and refused.headers["retry-after"]
        message = refused.json()["error"]["message"]
        assert "waiting" in message and f"server.limits.{setting})" in message
    for setting, refused in never.items():
        assert refused.status_code == 400
        assert f"server.limits.{setting})" in refused.json()["error"]["message"]


def _post_unread(url: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request was sent."""
    where, content = httpx.URL(url), json.dumps(body).encode()
    connection = socket.create_connection((where.host, where.port or 80))
    head = f"POST {where.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    connection.sendall(f"{head}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def test_a_model_without_tokenizer_takes_and_gives_token_ids(serve: Any, tmp_path: Path) -> None:
    served = serve(write_tiny_model(tmp_path), "--served-model-name", "bare")
    url = f"{served.url}/v1"
    body = {"prompt": [5, 6], "max_tokens": 3, **WITHOUT_END}
    (choice,) = httpx.post(f"{url}/completions", json=body).json()["choices"]
    assert choice["text"] == ""
    assert len(choice["token_ids"]) == 3
    for path, field, value in (
        ("completions", "prompt", "text"),
        ("chat/completions", "messages", [{"role": "user", "content": "text"}]),
    ):
        answer = httpx.post(f"{url}/{path}", json={field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
        assert "no tokenizer" in answer.json()["error"]["message"]
