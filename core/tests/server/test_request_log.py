"""A refusal has a line in the log: one, short, and nothing in it acts on a terminal."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from pegboard.config import LimitsConfig, ServerConfig
from pegboard.server.app import Service, create_app
from pegboard.server.engine_client import EngineClient
from pegboard.server.engine_watch import EngineWatch
from pegboard.server.keys import Keys
from pegboard.server.messages import Start
from pegboard.server.request_log import MAX_REFUSALS, RequestLog
from pegboard.server.served_model import ServedModel

MODEL = ServedModel(
    names=("tiny",),
    root="tiny",
    created=0,
    vocab_size=512,
    max_model_len=64,
    fingerprint="fp",
    tokenizer=None,
    renderer=None,
    limits=LimitsConfig(),
)
COMPLETIONS = "/v1/completions"


def ask(
    method: str,
    path: str,
    log: RequestLog | None,
    headers: dict[str, str] | None = None,
    times: int = 1,
    **sent: Any,
) -> int:
    """The status of a server's answer, which wants the key `secret`."""

    async def run() -> int:
        engine = EngineClient(Start(b""), EngineWatch(10, 30))
        config = ServerConfig.model_validate({"limits": {"body": 2000}})
        service = Service(config, Keys(("secret",)), MODEL, engine, max_num_seqs=1, log=log)
        transport = httpx.ASGITransport(create_app(service))
        key = {"authorization": "Bearer secret"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for _ in range(times):
                answer = await http.request(method, path, headers=key | (headers or {}), **sent)
        await engine.stop()
        return answer.status_code

    return asyncio.run(run())


REFUSED: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "no such field": (400, "POST", COMPLETIONS, {"json": {"prompt": [5], "temprature": 1}}),
    "no JSON": (400, "POST", COMPLETIONS, {"content": b"{"}),
    "no body": (400, "POST", COMPLETIONS, {}),
    "no key": (401, "POST", COMPLETIONS, {"headers": {"authorization": "Bearer wrong"}}),
    "no admin": (403, "GET", "/metrics", {}),
    "no such model": (404, "GET", "/v1/models/other", {}),
    "no such route": (404, "GET", "/nothing", {}),
    "no such method": (405, "PUT", COMPLETIONS, {}),
    "too large": (413, "POST", COMPLETIONS, {"content": b" " * 3000}),
    "not ready": (503, "POST", COMPLETIONS, {"json": {"prompt": [5]}}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_a_line(case: str, caplog: pytest.LogCaptureFixture) -> None:
    status, method, path, sent = REFUSED[case]
    assert ask(method, path, RequestLog(), **sent) == status
    (line,) = caplog.messages
    assert line.startswith(f"refused status={status} method='{method}' path='{path}' client=")
    assert "secret" not in line and "wrong'" not in line
    caplog.clear()
    assert ask(method, path, None, **sent) == status
    assert not caplog.messages


def test_what_is_answered_and_probes_have_no_line_here(caplog: pytest.LogCaptureFixture) -> None:
    for path in ("/v1/models", "/version", "/live", "/health", "/ready"):
        ask("GET", path, RequestLog())
    assert not caplog.messages


NASTY = "a\nb\rc\x1b[31md\x00e\u2028f\u202eg\x85h"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/%0aINFO%20forged%1b[2J%e2%80%a8", {}),
        (COMPLETIONS, {"prompt": [5], "model": NASTY}),
        (COMPLETIONS, {"prompt": [5], NASTY: 1}),
        (COMPLETIONS, {"prompt": [5], "model": "m" * 1500}),
        ("/" + "x" * 1500, {}),
    ],
)
def test_what_clients_write_is_cut_and_escaped(
    path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"content-type": "application/json"}
    ask("POST", path, RequestLog(), headers, content=json.dumps(body).encode())
    (line,) = caplog.messages
    assert line.isprintable() and len(line) < 700, line


def test_a_flood_of_refusals_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    ask("GET", "/nothing", RequestLog(), times=10 * MAX_REFUSALS)
    assert len(caplog.messages) == MAX_REFUSALS
