"""Habits of clients of other servers are honoured here as there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI

from pegboard.testing.tiny import write_tiny_model

MAX_MODEL_LEN = 64
HELLO: Any = [{"role": "user", "content": "Hello"}]
NAMES = ["tiny", "gpt-3.5-turbo", "org/other"]


@pytest.fixture(scope="module")
def served(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True, num_hidden_layers=1)
    names = ("--served-model-name", *NAMES[:2], "--max-model-len", str(MAX_MODEL_LEN))
    return serve(model, *names, "--served-model-name", NAMES[2])


@pytest.fixture
def client(served: Any) -> Iterator[OpenAI]:
    with served.client() as client:
        yield client


@pytest.fixture
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


def test_all_names_are_listed_and_served(client: OpenAI) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == NAMES
    assert len({card.created for card in cards}) == 1
    for name in NAMES:
        assert client.models.retrieve(name).id == name
        completion = client.completions.create(model=name, prompt=[5], max_tokens=1)
        chat = client.chat.completions.create(model=name, messages=HELLO, max_tokens=1)
        assert completion.model == chat.model == name
        chunks = client.chat.completions.create(
            model=name, messages=HELLO, max_tokens=2, stream=True
        )
        assert {chunk.model for chunk in chunks} == {name}
    with pytest.raises(NotFoundError, match=r"served: tiny, gpt-3\.5-turbo, org/other"):
        client.completions.create(model="another", prompt=[5], max_tokens=1)


def test_who_names_no_model_is_answered_by_the_first_name(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
    assert answer.json()["model"] == "tiny"
    metrics = http.get("/metrics").text
    assert 'model_name="tiny"' in metrics and 'model_name="org/other"' not in metrics


def answer(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    """The answer of a completion or a chat, greedy and without an end of its own."""
    asked = {"prompt": [5, 6, 7]} if path == "/v1/completions" else {"messages": HELLO}
    body = {**asked, "temperature": 0, "ignore_eos": True, **fields}
    answered = http.post(path, json=body)
    assert answered.status_code == 200, answered.text
    found: dict[str, Any] = answered.json()
    return found


@pytest.mark.parametrize("most", [MAX_MODEL_LEN, 4096, 2**31 - 1])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "max_tokens"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
    ],
)
def test_an_answer_is_cut_where_the_context_ends(
    http: httpx.Client, path: str, field: str, most: int
) -> None:
    found = answer(http, path, **{field: most})
    assert found["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert found["choices"][0]["finish_reason"] == "length"
    num_prompt = found["usage"]["prompt_tokens"]
    assert found == found | answer(http, path, **{field: MAX_MODEL_LEN - num_prompt}) | {
        "id": found["id"],
        "created": found["created"],
    }


def test_what_an_answer_that_is_cut_does_not_hold_counts_for_no_limit(http: httpx.Client) -> None:
    found = answer(http, "/v1/completions", max_tokens=2**31 - 1, logprobs=20)
    assert found["usage"]["total_tokens"] == MAX_MODEL_LEN


def test_the_longest_prompt_leaves_room_for_one_token(http: httpx.Client) -> None:
    prompt = [5] * (MAX_MODEL_LEN - 1)
    found = answer(http, "/v1/completions", prompt=prompt, max_tokens=100)
    assert found["usage"]["completion_tokens"] == 1
    body = {"prompt": [*prompt, 5], "max_tokens": 1}
    refused = http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert "maximum context length is 64 tokens, but 65 were requested" in refused.text
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_seed_of_minus_one_is_none(http: httpx.Client, path: str) -> None:
    def texts(seed: int) -> set[str]:
        found = [
            answer(http, path, temperature=1, max_tokens=12, seed=seed, return_token_ids=True)
            for _ in range(3)
        ]
        return {str(one["choices"][0]["token_ids"]) for one in found}

    assert len(texts(-1)) == 3
    assert len(texts(-2)) == len(texts(7)) == 1


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_is_counted_in_each_chunk(
    http: httpx.Client, path: str, include_usage: bool, n: int
) -> None:
    options = {"include_usage": include_usage, "continuous_usage_stats": True}
    asked = {"prompt": [5, 6]} if path == "/v1/completions" else {"messages": HELLO}
    body = {"n": n, "max_tokens": 9, "ignore_eos": True, "return_token_ids": True, **asked}
    answer = http.post(path, json={**body, "stream": True, "stream_options": options})
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    num_seen, num_prompt = 0, chunks[-1]["usage"]["prompt_tokens"]
    for chunk in chunks:
        num_seen += sum(len(choice.get("token_ids") or ()) for choice in chunk["choices"])
        usage = chunk["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_seen)
        assert usage["total_tokens"] == num_prompt + num_seen
    assert num_seen == 9 * n
    assert (chunks[-1]["choices"] == []) == include_usage


def test_usage_is_left_out_of_chunks_unless_asked_for(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": False}
    body = {"prompt": [5], "max_tokens": 4, "stream": True, "stream_options": options}
    lines = http.post("/v1/completions", json=body).text.splitlines()
    assert sum('"usage"' in line for line in lines) == 1
