"""Access by key, and, where there are none, by what a browser says of the page that asks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from pegboard.config import Config, ServerConfig
from pegboard.errors import ConfigError
from pegboard.server.app import Service, create_app
from pegboard.server.engine_client import EngineClient
from pegboard.server.engine_watch import EngineWatch
from pegboard.server.keys import Keys
from pegboard.server.messages import Start
from pegboard.server.served_model import ServedModel

MODEL = ServedModel(
    names=("tiny",),
    root="tiny",
    created=0,
    vocab_size=512,
    max_model_len=64,
    limits=ServerConfig().limits,
    fingerprint="fp",
    tokenizer=None,
    renderer=None,
)
PROBES = ("/health", "/live", "/ready")
LOADING = 503
"""The status of what was let in, and needs the engine, which has not started here."""


Headers = Mapping[str, str] | Mapping[bytes, bytes]


def ask(
    *requests: tuple[str, str, Headers],
    keys: Keys = Keys(),
    on_loopback: bool = True,
    **settings: Any,
) -> list[httpx.Response]:
    """The answers of a server to these: method, path, headers. Without a Host it is localhost."""

    async def run() -> list[httpx.Response]:
        engine = EngineClient(Start(b""), EngineWatch(10, 30))
        service = Service(
            ServerConfig(**settings), keys, MODEL, engine, max_num_seqs=1, on_loopback=on_loopback
        )
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answers = [
                await http.request(method, path, headers=headers)
                for method, path, headers in requests
            ]
        await engine.stop()
        return answers

    return asyncio.run(run())


def statuses(*requests: tuple[str, str, Headers], **server: Any) -> list[int]:
    return [answer.status_code for answer in ask(*requests, **server)]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", ["cl\u00e9-\u00e0", "\u00c5", "\u043a\u043b\u044e\u0447", "plain"])
def test_a_key_of_any_letters_is_known_in_both_headers(key: str) -> None:
    sent = key.encode()
    for headers in ({b"authorization": b"Bearer " + sent}, {b"x-api-key": sent}):
        (status,) = statuses(("GET", "/v1/models", headers), keys=Keys(api=(key,)))
        assert status == 200


ADMINS_ROUTES = [("GET", "/metrics", 200), ("POST", "/reset_prefix_cache", LOADING)]


@pytest.mark.parametrize(("method", "path", "open_"), ADMINS_ROUTES)
def test_what_concerns_all_clients_is_the_admins(method: str, path: str, open_: int) -> None:
    def tried(keys: Keys) -> list[int]:
        headers = [{}, bearer("user"), bearer("boss"), {"x-api-key": "boss"}, bearer("wrong")]
        return statuses(*((method, path, given) for given in headers), keys=keys)

    assert tried(Keys()) == [open_] * 5
    assert tried(Keys(("user",), ("boss",))) == [401, 403, open_, open_, 401]
    assert tried(Keys(("user",))) == [401, 403, 401, 401, 401]
    assert tried(Keys((), ("boss",))) == [401, 401, open_, open_, 401]


@pytest.mark.parametrize(("method", "path", "_open"), ADMINS_ROUTES)
def test_the_refusal_names_the_setting(method: str, path: str, _open: int) -> None:
    for keys in (Keys(("user",)), Keys(("user",), ("boss",))):
        (answer,) = ask((method, path, bearer("user")), keys=keys)
        error = answer.json()["error"]
        assert "server.admin_keys" in error["message"]
        assert error["type"] == "permission_error"


def test_an_admins_key_lets_in_wherever_a_users_does() -> None:
    paths = [("GET", "/v1/models"), ("GET", "/version"), ("POST", "/v1/completions")]
    for given in ("user", "boss"):
        requests = [(method, path, bearer(given)) for method, path in paths]
        assert statuses(*requests, keys=Keys(("user",), ("boss",))) == [200, 200, 400]


def test_admins_keys_alone_leave_the_rest_open() -> None:
    requests = [("GET", "/v1/models", given) for given in ({}, bearer("boss"), bearer("wrong"))]
    assert statuses(*requests, keys=Keys((), ("boss",))) == [200] * 3


LOCAL = [
    "localhost",
    "LocalHost:8000",
    "localhost.",
    "127.0.0.1",
    "127.8.9.1:80",
    "[::1]",
    "[::1]:8000",
    "[0:0::1]:8000",
    "[::ffff:127.0.0.1]:1",
]
FOREIGN = [
    "",
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.1",
    "[2001:db8::1]",
    "localhost:x",
    "user@localhost",
    "localhost/",
    "::1",
    "[::1",
    "127.1",
    "127.0.0.1%evil.example",
    "localhost localhost",
]


def test_a_loopback_server_without_keys_answers_to_its_own_names_alone() -> None:
    paths = [("GET", "/v1/models", 200), ("GET", "/live", 200), ("POST", "/v1/completions", 400)]
    for method, path, expected in paths:
        local = [(method, path, {"host": host}) for host in LOCAL]
        foreign = [(method, path, {"host": host}) for host in FOREIGN]
        assert statuses(*local) == [expected] * len(LOCAL)
        assert statuses(*foreign) == [403] * len(FOREIGN)


def test_the_refusal_of_a_host_names_it_and_the_setting() -> None:
    (answer,) = ask(("GET", "/v1/models", {"host": "evil.example"}))
    error = answer.json()["error"]
    assert "'evil.example'" in error["message"] and "server.allowed_hosts" in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_other_hosts_are_allowed_by_name() -> None:
    hosts = ["Box.example.org", "10.0.0.1", "[2001:db8::1]"]
    asked = [
        "box.example.org:9",
        "BOX.EXAMPLE.ORG",
        "10.0.0.1:8000",
        "[2001:DB8:0::1]",
        "localhost",
    ]
    requests = [("GET", "/v1/models", {"host": host}) for host in asked]
    assert statuses(*requests, allowed_hosts=hosts) == [200] * len(asked)
    others = [("GET", "/v1/models", {"host": host}) for host in ("a.box.example.org", "10.0.0.2")]
    assert statuses(*others, allowed_hosts=hosts) == [403] * 2


@pytest.mark.parametrize("host", ["http://box", "box:8000", "box/", "*.box", "a b", "", "user@box"])
def test_what_is_no_host_is_not_allowed_as_one(host: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        Config.from_values({"model": "m", "server": {"allowed_hosts": [host]}})


SAME = [
    ("localhost:8000", "http://localhost:8000"),
    ("LOCALHOST:8000", "http://localhost:8000"),
    ("localhost", "http://localhost"),
    ("localhost:80", "http://localhost"),
    ("localhost", "https://localhost:443"),
    ("[::1]:8000", "http://[::1]:8000"),
]
OTHER = [
    ("localhost:8000", "http://evil.example"),
    ("localhost:8000", "http://localhost:3000"),
    ("localhost:8000", "https://localhost"),
    ("localhost:8000", "null"),
    ("localhost:8000", ""),
    ("localhost:8000", "localhost:8000"),
    ("localhost:8000", "app://localhost:8000"),
    ("localhost:8000", "http://localhost:8000/"),
    ("localhost:8000", "http://localhost:8000 http://evil.example"),
    ("localhost:8000", "http://127.0.0.1:8000"),
]


@pytest.mark.parametrize("on_loopback", [True, False])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/nothing"]
)
def test_a_page_of_another_site_cannot_post(path: str, on_loopback: bool) -> None:
    def posted(pairs: list[tuple[str, str]]) -> list[int]:
        requests = [("POST", path, {"host": host, "origin": origin}) for host, origin in pairs]
        return statuses(*requests, on_loopback=on_loopback)

    assert posted(OTHER) == [403] * len(OTHER)
    expected = 404 if path == "/nothing" else 400
    assert posted(SAME) == [expected] * len(SAME)


def test_reading_is_not_posting() -> None:
    requests = [("GET", "/v1/models", {"origin": "http://evil.example"})]
    assert statuses(*requests) == [200]


def test_a_server_of_other_machines_answers_to_any_name() -> None:
    requests = [("GET", "/v1/models", {"host": host}) for host in ("box.example.org", "10.0.0.1")]
    assert statuses(*requests, on_loopback=False) == [200] * 2


def test_with_keys_neither_name_nor_page_counts() -> None:
    headers = bearer("user") | {"host": "evil.example", "origin": "http://other.example"}
    requests = [("GET", "/v1/models", headers), ("POST", "/v1/completions", headers)]
    assert statuses(*requests, keys=Keys(("user",))) == [200, 400]
    # An admin's keys keep nobody from the rest.
    assert statuses(*requests, keys=Keys((), ("boss",))) == [403, 403]


def test_head_is_get_without_a_body() -> None:
    paths = [*PROBES, "/version", "/v1/models", "/v1/models/tiny", "/metrics", "/openapi.json"]
    for path in paths:
        got, head = ask(("GET", path, {}), ("HEAD", path, {}))
        assert head.status_code == got.status_code != 405, path
        assert head.headers["content-type"] == got.headers["content-type"]
    (schema,) = ask(("GET", "/openapi.json", {}))
    assert not any("head" in methods for methods in schema.json()["paths"].values())


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", ["prompt"]),
        ("/v1/chat/completions", ["messages"]),
        ("/tokenize", ["prompt", "messages"]),
        ("/detokenize", ["tokens"]),
    ],
)
def test_an_empty_body_is_told_what_is_required(path: str, fields: list[str]) -> None:
    for headers in ({}, {"content-type": "application/json"}):
        (answer,) = ask(("POST", path, headers))
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["message"].startswith("the body is empty; ")
        assert all(field in error["message"] for field in fields), error
        assert error["param"] == fields[0]
