"""Each policy at work in a whole engine: who goes first, and that nobody's tokens change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from pegboard import Engine, SamplingParams
from pegboard.cli import main
from pegboard.interfaces.observer import Event, Observer, StepDone
from pegboard.testing.tiny import write_tiny_model

PACKAGES = {
    "priority": "pegboard_schedulers",
    "prefix_aware": "pegboard_schedulers",
    "fair": "pegboard_schedulers",
    "reserve": "pegboard_schedulers",
    "shortest": "pegboard_schedulers",
    "static": "pegboard_baselines",
}
BLOCK_SIZE = 4
BLOCK_BYTES = 2 * 2 * 24 * 8 * BLOCK_SIZE
"""Layers x (k, v) x head x float64 x tokens."""


@dataclass(frozen=True)
class Asked:
    """A request: what is asked for, and how."""

    prompt: Sequence[int]
    max_tokens: int = 8
    n: int = 1
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class Ran(Observer):
    """The outcome of requests.

    Attributes:
        tokens: of each sequence, by request and index.
        begun, ended: requests in the order of their sequences' first tokens, and last ones.
        num_cached: prompt tokens that a cache had, all sequences together.
        num_preempted: sequences.
    """

    tokens: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    begun: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_preempted: int = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.num_preempted += event.num_preempted

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), dtype="float64", tokenizer=True)


def config(model: Path, scheduler: str, num_blocks: int, **settings: Any) -> dict[str, Any]:
    if scheduler in PACKAGES:
        pytest.importorskip(PACKAGES[scheduler])
    return {
        "model": str(model),
        "dtype": "float64",
        "threads": 1,
        "max_model_len": 96,
        "prefix_cache": settings.get("prefix_cache", "none"),
        "kv_cache": {"block_size": BLOCK_SIZE, "memory": (num_blocks + 1) * BLOCK_BYTES},
        "scheduler": {
            "name": scheduler,
            "max_num_seqs": settings.get("max_num_seqs", 4),
            "max_num_batched_tokens": 32,
            "options": settings.get("options", {}),
        },
    }


def run(
    model: Path,
    scheduler: str,
    *waves: Sequence[Asked],
    num_blocks: int = 200,
    stop: Callable[[Ran], bool] = lambda ran: False,
    **settings: Any,
) -> Ran:
    """Runs requests that come in waves, three steps apart, in an engine of so many blocks of KV."""
    ran = Ran()
    with Engine(config(model, scheduler, num_blocks, **settings), observer=ran) as engine:
        numbers: dict[str, int] = {}
        to_come = list(waves)
        while to_come or engine.has_work():
            for asked in to_come.pop(0) if to_come else ():
                params = SamplingParams(
                    max_tokens=asked.max_tokens, n=asked.n, seed=len(numbers), ignore_eos=True
                )
                request = engine.submit(list(asked.prompt), params, **asked.fields)
                numbers[request.request_id] = len(numbers)
            for _ in range(3):
                _note(ran, numbers, engine.step())
            if stop(ran):
                break
        assert not engine.core.cut_off
    return ran


def _note(ran: Ran, numbers: dict[str, int], deltas: Sequence[Any]) -> None:
    for delta in deltas:
        key = numbers[delta.request_id], delta.index
        if key not in ran.tokens:
            ran.begun.append(key[0])
        ran.tokens[key] = ran.tokens.get(key, ()) + delta.token_ids
        if delta.finish_reason is not None:
            assert delta.finish_reason == "length", delta.error
            ran.ended.append(key[0])
            ran.num_cached += delta.num_cached_tokens


MIXED = [
    Asked(
        [*range(2, 2 + 3 * (number % 4)), *range(100 + number, 106 + 2 * number)],
        max_tokens=4 + 5 * number % 23,
        n=1 + 2 * (number % 3 == 0),
        fields={"priority": number % 3, "tenant": "ab"[number % 2]},
    )
    for number in range(12)
]


@pytest.fixture(scope="module")
def expected(model: Path) -> Ran:
    return run(model, "fcfs", MIXED)


@pytest.mark.parametrize(
    ("prefix_cache", "num_blocks"),
    [
        ("none", 26),
        ("trie", 200),
        pytest.param("none", 200, marks=pytest.mark.slow),
        pytest.param("trie", 26, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("scheduler", PACKAGES)
def test_tokens_are_those_of_fcfs(
    model: Path, expected: Ran, scheduler: str, prefix_cache: str, num_blocks: int
) -> None:
    if prefix_cache == "trie":
        pytest.importorskip("pegboard_prefix_cache")
    waves = MIXED[:5], MIXED[5:6], MIXED[6:]
    ran = run(model, scheduler, *waves, num_blocks=num_blocks, prefix_cache=prefix_cache)
    assert ran.tokens == expected.tokens


def test_a_higher_class_overtakes(model: Path) -> None:
    """Two rows: of the low ones two run and one waits when the high one comes."""
    low = [Asked([10 + n, 3, 4], 20, fields={"priority": 1}) for n in range(3)]
    high = [Asked([50, 3, 4], 6, fields={"priority": 0})]
    ran = run(model, "priority", low, high, max_num_seqs=2, options={"max_wait": None})
    assert (ran.begun, ran.ended) == ([0, 1, 3, 2], [3, 0, 1, 2])
    assert ran.num_preempted == 1
    in_order = run(model, "fcfs", low, high, max_num_seqs=2)
    assert in_order.begun == [0, 1, 2, 3] and in_order.num_preempted == 0
    assert in_order.tokens == ran.tokens


def test_two_tenants_share_evenly(model: Path) -> None:
    """One sends twenty requests and the other, a little later, twenty of its own."""
    first = [Asked([10 + n, 3, 4], 10, fields={"tenant": "a"}) for n in range(20)]
    second = [Asked([50 + n, 3, 4], 10, fields={"tenant": "b"}) for n in range(20)]

    def shares(scheduler: str) -> tuple[int, int]:
        ran = run(
            model, scheduler, first, second, max_num_seqs=2, stop=lambda ran: len(ran.ended) >= 20
        )
        return sum(n < 20 for n in ran.ended), sum(n >= 20 for n in ran.ended)

    of_a, of_b = shares("fair")
    assert abs(of_a - of_b) <= 3
    assert shares("fcfs")[1] == 0


def test_a_tenant_of_more_weight_gets_more(model: Path) -> None:
    requests = [Asked([10 + n, 3, 4], 10, fields={"tenant": "ab"[n % 2]}) for n in range(40)]
    options = {"weights": {"a": 3.0}}
    ran = run(
        model,
        "fair",
        requests,
        max_num_seqs=2,
        options=options,
        stop=lambda ran: len(ran.ended) >= 20,
    )
    of_a = sum(n % 2 == 0 for n in ran.ended)
    assert 13 <= of_a <= 17, "three quarters of twenty"


def test_reserve_preempts_nobody_where_fcfs_does(model: Path) -> None:
    """Blocks for two and a half: four prompts fit, and not what they become."""
    requests = [Asked([10 + n, *range(20, 31)], 40) for n in range(6)]
    in_order = run(model, "fcfs", requests, num_blocks=33)
    reserved = run(model, "reserve", requests, num_blocks=33)
    assert in_order.num_preempted > 0 and reserved.num_preempted == 0
    assert reserved.tokens == in_order.tokens


def test_those_who_share_a_prefix_go_together(model: Path) -> None:
    """A pool for one system prompt and little more: who takes turns computes much of it again."""
    pytest.importorskip("pegboard_prefix_cache")
    prompts = {"x": list(range(2, 62)), "y": list(range(102, 162))}
    requests = [Asked([*prompts["xy"[n % 2]], 200 + n], 4) for n in range(10)]
    settings: dict[str, Any] = {"max_num_seqs": 1, "num_blocks": 24, "prefix_cache": "trie"}
    in_turn = run(model, "fcfs", requests, **settings)
    together = run(model, "prefix_aware", requests, **settings)
    assert in_turn.begun == list(range(10))
    assert together.begun == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    assert together.num_cached == 8 * 60
    assert in_turn.num_cached < 0.6 * together.num_cached
    assert together.tokens == in_turn.tokens


def test_overtaking_for_a_prefix_has_an_end(model: Path) -> None:
    pytest.importorskip("pegboard_prefix_cache")
    shared = list(range(2, 42))
    requests = [
        Asked([*shared, 200], 2),
        Asked([*range(102, 142)], 2),
        *(Asked([*shared, 210 + n], 2) for n in range(6)),
    ]
    options = {"max_overtakes": 3}
    ran = run(model, "prefix_aware", requests, max_num_seqs=1, prefix_cache="trie", options=options)
    assert ran.begun == [0, 2, 3, 4, 1, 5, 6, 7]


def test_the_shortest_answer_goes_first(model: Path) -> None:
    requests = [Asked([10 + n, 3, 4], max_tokens) for n, max_tokens in enumerate((9, 30, 3, 12))]
    assert run(model, "shortest", requests, max_num_seqs=1).ended == [2, 0, 3, 1]


def test_nobody_joins_a_static_batch(model: Path) -> None:
    requests = [Asked([10 + n, 3, 4], 4 + 20 * (n == 1)) for n in range(6)]
    assert run(model, "static", requests, max_num_seqs=3).ended[:3] == [0, 2, 1]
    assert run(model, "fcfs", requests, max_num_seqs=3).ended[-1] == 1


@pytest.mark.parametrize("scheduler", PACKAGES)
def test_check_says_that_it_goes_together(
    model: Path, scheduler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(PACKAGES[scheduler])
    assert main(["check", str(model), "--set", f"scheduler.name={scheduler}"]) == 0
    assert scheduler in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scheduler", "option", "value"),
    [
        ("priority", "max_wait", "0"),
        ("prefix_aware", "max_overtakes", "-1"),
        ("prefix_aware", "window", "0"),
        ("fair", "output_weight", "none"),
        ("fair", "weights.a", "-2"),
        ("shortest", "max_wait", "soon"),
    ],
)
def test_a_wrong_option_is_named_by_its_whole_path(
    model: Path, scheduler: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(PACKAGES[scheduler])
    setting = f"scheduler.options.{option}"
    arguments = ["--set", f"scheduler.name={scheduler}", "--set", f"{setting}={value}"]
    assert main(["check", str(model), *arguments]) == 2
    assert setting in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scheduler", "many", "one"),
    [
        ("fair", {"user": "ann"}, {"user": "bob"}),
        pytest.param("priority", {"priority": 2}, {"priority": 1}, marks=pytest.mark.slow),
    ],
)
def test_what_a_client_says_lets_it_go_before_a_long_queue(
    serve: Any, model: Path, scheduler: str, many: dict[str, Any], one: dict[str, Any]
) -> None:
    pytest.importorskip(PACKAGES[scheduler])
    settings = (f"scheduler.name={scheduler}", "scheduler.max_num_seqs=1", "prefix_cache=none")
    served = serve(model, *(text for setting in settings for text in ("--set", setting)))
    url = f"{served.url}/v1/completions"
    common = {"max_tokens": 150, "ignore_eos": True, "seed": 1}
    queue = {**common, **many, "prompt": [[5, 6, 7 + n] for n in range(12)], "stream": True}
    with httpx.stream("POST", url, json=queue, timeout=120) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: "), "the first of twelve runs"
        ended: list[str] = []
        reader = threading.Thread(
            target=lambda: ended.extend(
                line for line in lines if '"finish_reason":"length"' in line
            )
        )
        reader.start()
        answer = httpx.post(url, json={**common, **one, "prompt": [5, 6, 90]}, timeout=120)
        num_before = len(ended)
        reader.join()
    assert answer.status_code == 200, answer.text
    assert num_before < len(ended) == 12
