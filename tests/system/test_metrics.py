"""`/metrics` after many requests of many kinds: the numbers are those that the clients added up."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pegboard.testing.tiny import write_tiny_model

VOCAB_SIZE = 517
CONCURRENCY = 24
COMPLETIONS = "/v1/completions"

Samples = dict[str, float]

PLUGIN = """# /// pegboard
# [plugin]
# name = "nothing"
# [[provides]]
# interface = "logits_processor"
# version = 1
# name = "nothing"
# summary = "Leaves no token that could be sampled"
# params = ":Params"
# ///
from pydantic import BaseModel

from pegboard import hookimpl
from pegboard.interfaces.logits_processor import LogitsProcessor


class Params(BaseModel): ...


class Nothing(LogitsProcessor):
    def __init__(self, context): ...
    def admit(self, row, params): ...
    def release(self, row): ...

    def apply(self, logits, rows):
        logits[:] = float("-inf")


@hookimpl
def pegboard_logits_processors():
    return {"nothing": Nothing}
"""


@pytest.fixture(scope="module")
def served(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, tokenizer=True, num_hidden_layers=1)
    plugin = folder / "nothing.py"
    plugin.write_text(PLUGIN)
    settings = (
        "prefix_cache=none",
        "scheduler.max_num_seqs=16",
        "server.limits.n=8",
        f"plugins.load=[{plugin}]",
        "logits_processors=[nothing]",
    )
    return serve(folder, *(word for one in settings for word in ("--set", one)))


@dataclass
class Sums:
    """The answers that clients got.

    Attributes:
        statuses: HTTP status to answers.
        reasons: finish reason to sequences.
        prompt_tokens: of requests that were answered, by the answers' usage.
        output_tokens: the same of completions.
        prompts: prompt's length of each sequence that the engine took.
        outputs: tokens of each sequence that was answered.
        longest: of each request, the tokens of its longest sequence.
        params_n, params_max_tokens: of each request that the engine took.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    prompts: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    longest: list[int] = field(default_factory=list)
    params_n: list[int] = field(default_factory=list)
    params_max_tokens: list[int] = field(default_factory=list)

    def take(self, body: dict[str, Any]) -> None:
        """Counts a request that reaches the engine."""
        n = body.get("n", 1)
        self.prompts += [len(body["prompt"])] * n
        self.params_n.append(n)
        self.params_max_tokens.append(body["max_tokens"])

    def add(self, body: dict[str, Any], answers: dict[int, Any], usage: Any) -> None:
        """Counts an answer, a choice an entry: its finish reason and its number of tokens."""
        assert len(answers) == body.get("n", 1)
        self.prompt_tokens += usage["prompt_tokens"]
        self.output_tokens += usage["completion_tokens"]
        lengths = [length for _, length in answers.values()]
        self.reasons.update(reason for reason, _ in answers.values())
        self.outputs += lengths
        self.longest.append(max(lengths))


def bodies(count: int) -> list[dict[str, Any]]:
    """Requests of all kinds, in a random order that is always the same."""
    choose = random.Random(5)
    made = []
    for number in range(count):
        body: dict[str, Any] = {
            "prompt": [choose.randrange(2, VOCAB_SIZE) for _ in range(choose.randint(1, 40))],
            "max_tokens": choose.randint(1, 12),
            "seed": number,
            "return_token_ids": True,
            "stream": choose.random() < 0.5,
        }
        match choose.randrange(10):
            case 0 | 1:
                body["n"] = choose.randint(2, 5)
            case 2 | 3:
                body |= {"stop": ["e", " "], "ignore_eos": True}
            case 4 | 5:
                body["stop_token_ids"] = choose.sample(range(VOCAB_SIZE), 150)
            case 6:
                body["temperature"] = 0
            case 7:
                body["processors"] = {"nothing": {}}
            case 8:
                body["top_p"] = 7
        made.append(body)
    return made


async def send(client: httpx.AsyncClient, body: dict[str, Any], sums: Sums) -> None:
    """Sends a request and adds up what comes."""
    if body["stream"]:
        body = {**body, "stream_options": {"include_usage": True}}
    answer = await client.post(COMPLETIONS, json=body)
    sums.statuses[answer.status_code] += 1
    if answer.status_code != 400:
        sums.take(body)
    if answer.status_code >= 500:
        sums.reasons["error"] += body.get("n", 1)
    if answer.status_code != 200:
        return
    found: dict[int, Any] = {}
    usage = None
    for event in _events(answer, body["stream"]):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            earlier = found.get(choice["index"], (None, 0))[1]
            length = earlier + len(choice["token_ids"])
            found[choice["index"]] = (choice["finish_reason"], length)
    sums.add(body, found, usage)


def _events(answer: httpx.Response, streamed: bool) -> list[Any]:
    if not streamed:
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def run(url: str, requests: Sequence[dict[str, Any]]) -> Sums:
    """Sends all, some at a time."""
    sums, free = Sums(), asyncio.Semaphore(CONCURRENCY)

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with free:
            await send(client, body, sums)

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(one(client, body) for body in requests))
    return sums


def scrape(url: str) -> Samples:
    """Samples by name and labels, the model's and the engine's left out."""
    samples = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=20).text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            name = sample.name + "".join(f"[{value}]" for value in labels.values())
            assert name not in samples, f"{name} stands twice"
            samples[name] = sample.value
    return samples


def settled(url: str) -> Samples:
    """Metrics that were made after this call began; the engine pushes them once a second."""
    began = time.monotonic()
    while True:
        asked = time.monotonic()  # the answer may take a while to come, which makes nothing newer
        found = scrape(url)
        if found["pegboard_engine_metrics_age_seconds"] < asked - began:
            return found
        assert asked < began + 30
        time.sleep(0.1)


def expected(sums: Sums) -> Samples:
    """Counts by the name that both have."""
    lists = {
        "request_prompt_tokens": sums.prompts,
        "request_params_n": sums.params_n,
        "request_params_max_tokens": sums.params_max_tokens,
    }
    values: Samples = {
        "prompt_tokens_total": sums.prompt_tokens,
        "prompt_tokens_cached_total": 0,
        "prefix_cache_queries_total": 0,
        "generation_tokens_total": sums.output_tokens,
        "num_preemptions_total": 0,
        "request_generation_tokens_sum": sum(sums.outputs),
        "request_max_num_generation_tokens_sum": sum(sums.longest),
        "request_num_preemptions_sum": 0,
        "time_to_first_token_seconds_count": len(sums.outputs),
        "inter_token_latency_seconds_count": sum(sums.outputs) - len(sums.outputs),
        "request_prefill_time_seconds_count": len(sums.outputs),
        "request_decode_time_seconds_count": len(sums.outputs),
        "request_prefill_kv_computed_tokens_count": len(sums.outputs),
        "request_time_per_output_token_seconds_count": sum(n > 1 for n in sums.outputs),
        "e2e_request_latency_seconds_count": len(sums.prompts),
        "request_queue_time_seconds_count": len(sums.prompts),
        "request_inference_time_seconds_count": len(sums.prompts),
    }
    for reason in ("stop", "length", "abort", "error"):
        values[f"request_success_total[{reason}]"] = sums.reasons[reason]
    for name, numbers in lists.items():
        values[f"{name}_count"], values[f"{name}_sum"] = len(numbers), sum(numbers)
        for bound in (1, 2, 5, 10, 20):
            values[f"{name}_bucket[{bound}.0]"] = sum(number <= bound for number in numbers)
    return values


def most_computed(sums: Sums) -> int:
    """Tokens that are computed where each sequence computes its prompt. Its last token is not."""
    return sum(sums.prompts) + sum(n - 1 for n in sums.outputs)


def fewest_computed(sums: Sums) -> int:
    """The same where each sequence begins with a sibling's prompt, but for the last token of it."""
    num_forked = len(sums.prompts) - len(sums.params_n)
    return sums.prompt_tokens + num_forked + sum(n - 1 for n in sums.outputs)


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_counts_are_those_of_the_clients(served: Any, count: int) -> None:
    before = settled(served.url)
    sums = asyncio.run(run(served.url, bodies(count)))
    assert set(sums.statuses) == {200, 400, 500} and sums.statuses.total() == count
    assert min(sums.reasons[reason] for reason in ("stop", "length", "error")) > count / 20
    after = settled(served.url)
    wrong = {
        name: (after[name] - before[name], value)
        for prefix in ("pegboard_", "vllm:")
        for name, value in ((prefix + known, value) for known, value in expected(sums).items())
        if after[name] - before[name] != value
    }
    assert not wrong
    name = "pegboard_iteration_tokens_total_sum"
    assert fewest_computed(sums) <= after[name] - before[name] <= most_computed(sums)
    failed = "pegboard_errors_total[RowFailed]"
    assert after[failed] - before.get(failed, 0) == sums.reasons["error"]
    for status, answers in sums.statuses.items():
        name = f"pegboard_http_requests_total[{COMPLETIONS}][{status}]"
        assert after[name] - before.get(name, 0) == answers
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"vllm:{name}"] == after[f"pegboard_{name}"] == 0
    assert after["pegboard_step_sequences_count"] == after["vllm:iteration_tokens_total_count"]


@pytest.mark.slow
def test_clients_that_leave_are_counted(serve: Any, tmp_path: Path) -> None:
    """Some of them while their sequences run, some while they wait."""
    write_tiny_model(tmp_path, num_hidden_layers=1, max_position_embeddings=20_000)
    served = serve(tmp_path, "--set", "prefix_cache=none", "--set", "scheduler.max_num_seqs=16")
    before = settled(served.url)
    url, num_clients = served.url, 11
    body = {"prompt": [5, 6, 7], "max_tokens": 15_000, "ignore_eos": True, "stream": True, "n": 2}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:

            async def hold() -> None:
                async with client.stream("POST", COMPLETIONS, json=body) as answer:
                    async for _ in answer.aiter_lines():
                        pass

            tasks = [asyncio.create_task(hold()) for _ in range(num_clients)]
            busy: Samples = {}
            load = [16, 2 * num_clients - 16]
            names = ["vllm:num_requests_running", "vllm:num_requests_waiting"]
            while [busy.get(name) for name in names] != load:
                assert not any(task.done() for task in tasks), busy
                await asyncio.sleep(0.1)
                busy = await asyncio.to_thread(scrape, url)
            assert 0 < busy["vllm:kv_cache_usage_perc"] <= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    aborts, deadline = "request_success_total[abort]", time.monotonic() + 30
    while (after := settled(url))[f"vllm:{aborts}"] - before[f"vllm:{aborts}"] < 2 * num_clients:
        assert time.monotonic() < deadline
    for name, value in (
        (aborts, 2 * num_clients),
        ("e2e_request_latency_seconds_count", 2 * num_clients),
        ("request_params_n_count", num_clients),
    ):
        assert after[f"vllm:{name}"] - before[f"vllm:{name}"] == value, name
    # One that waited may have been admitted between two clients' leaving.
    queued = "vllm:request_queue_time_seconds_count"
    assert 16 <= after[queued] - before[queued] <= 2 * num_clients
    aborted = "pegboard_aborted_requests_total"
    assert after[aborted] - before[aborted] == num_clients
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"vllm:{name}"] == 0


def test_the_log_says_what_people_look_for(served: Any) -> None:
    for words in (
        "non-default args: {",
        "Model loading took ",
        "Available KV cache memory: ",
        "KV cache size: ",
        "Maximum concurrency for 512 tokens per request: ",
        "Application startup complete",
    ):
        assert words in served.log, words
