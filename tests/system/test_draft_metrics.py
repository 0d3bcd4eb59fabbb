"""Metrics of speculation: those of a server, of an engine and of `bench` are what the deltas say."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pegboard import Engine, SamplingParams
from pegboard.builtin.metrics_observer import MetricsObserver
from pegboard.cli import main
from pegboard.interfaces.observer import ObserverContext
from pegboard.request import SequenceDelta
from pegboard.testing.guessing_drafter import GuessingDrafter, Outputs
from pegboard.testing.tiny import write_tiny_model

NUM_NODES = 4
CONTEXT = ObserverContext("tiny", num_speculative_tokens=NUM_NODES)
VERIFIES_ALL = {"num_speculative_tokens": NUM_NODES, "policy": "fixed"}
DRAFTER = {"name": "ngram", **VERIFIES_ALL, "options": {"min_confidence": 0}}

Samples = dict[str, float]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True, num_hidden_layers=1)
    return {"model": str(model), "threads": 1, "prefix_cache": "none", "max_model_len": 128}


def requests() -> list[dict[str, Any]]:
    """Texts that repeat themselves and texts that do not, greedy and sampled."""
    dice = random.Random(3)
    bodies = []
    for number in range(10):
        phrase = [dice.randrange(4, 500) for _ in range(1 + 2 * number)]
        bias = {str(token): 9.0 for token in phrase[: number % 4]}
        bodies.append(
            {
                "prompt": (phrase * 30)[:30],
                "max_tokens": 20,
                "temperature": number % 2,
                "seed": number,
                "n": 1 + number % 3 // 2,
                "logit_bias": bias,
                "ignore_eos": True,
            }
        )
    return bodies


def samples(text: str) -> Samples:
    """By name and labels, the model's and the engine's left out."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + "".join(f"[{value}]" for value in labels.values())] = sample.value
    return found


def counted(deltas: Iterable[SequenceDelta]) -> Samples:
    """The metrics that the deltas of one step each say. What comes after a sequence's first token, and is
    more than one token, was accepted."""
    begun: set[tuple[str, int]] = set()
    gains: Counter[int] = Counter()
    for delta in deltas:
        key = (delta.request_id, delta.index)
        if key in begun:
            gains[len(delta.token_ids)] += 1
        elif delta.token_ids:
            assert len(delta.token_ids) == 1
            begun.add(key)
    found: Samples = {
        "num_accepted_tokens_total": sum((gain - 1) * count for gain, count in gains.items()),
        "tokens_per_step_sum": sum(gain * count for gain, count in gains.items()),
        "tokens_per_step_count": gains.total(),
        "chosen_tokens_count": gains.total(),
    }
    for position in range(NUM_NODES):
        more = sum(count for gain, count in gains.items() if gain > position + 1)
        found[f"num_accepted_tokens_per_pos_total[{position}]"] = more
    for most in range(1, NUM_NODES + 2):
        few = sum(count for gain, count in gains.items() if gain <= most)
        found[f"tokens_per_step_bucket[{float(most)}]"] = few
    return {f"pegboard_spec_decode_{name}": value for name, value in found.items()}


def run(engine: Engine, bodies: Sequence[dict[str, Any]]) -> list[SequenceDelta]:
    """One request after the other."""
    deltas: list[SequenceDelta] = []
    for body in bodies:
        fields = {key: value for key, value in body.items() if key not in ("prompt", "logit_bias")}
        bias = {int(token): value for token, value in body["logit_bias"].items()}
        engine.submit(tuple(body["prompt"]), SamplingParams(**fields, logit_bias=bias))
        while engine.has_work():
            deltas += engine.step()
    return deltas


@pytest.fixture(scope="module")
def served(serve: Any, config: dict[str, Any]) -> Any:
    settings = {**config, "drafter": json.dumps(DRAFTER)}
    model = settings.pop("model")
    del settings["threads"]  # a served process has one
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return serve(model, *words)


def test_a_server_counts_what_the_deltas_say(served: Any, config: dict[str, Any]) -> None:
    """One request after the other, so that a server and an engine take the same steps."""
    observer = MetricsObserver(CONTEXT)
    with Engine({**config, "drafter": DRAFTER}, observer=observer) as engine:
        deltas = run(engine, requests())
    expected = counted(deltas)
    assert expected["pegboard_spec_decode_num_accepted_tokens_per_pos_total[3]"] > 0
    with httpx.Client(base_url=served.url, timeout=60) as http:
        for body in requests():
            assert http.post("/v1/completions", json=body).status_code == 200
        found = fresh(http, "pegboard_spec_decode_tokens_per_step_sum", expected)
    ours = samples(observer.render())
    for name, value in expected.items():
        assert (name, found[name], ours[name]) == (name, value, value)
    for name, value in ours.items():
        # Times apart, all numbers of drafts are those of the engine, under vLLM's names too.
        if "spec_decode" in name and "seconds" not in name and "created" not in name:
            assert (name, found[name]) == (name, value)
    assert "vllm:spec_decode_num_accepted_tokens_per_pos_total[0]" in found
    seconds = {
        phase: found[f"pegboard_step_seconds_sum[{phase}]"]
        for phase in ("drafting", "forward", "sampling")
    }
    drafting = found["pegboard_spec_decode_drafting_seconds_total"]
    assert drafting == pytest.approx(seconds["drafting"])
    verifying = found["pegboard_spec_decode_verifying_seconds_total"]
    assert 0 < verifying < seconds["forward"] + seconds["sampling"]


def test_bench_says_what_the_server_counted(
    served: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def counters() -> Samples:
        return samples(httpx.get(f"{served.url}/metrics", timeout=20).text)

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{word * 8}"}}\n' for word in ("a b ", "the dog ")))
    load = ("--num-prompts", "4", "--max-concurrency", "1", "--output-len", "30")
    files = ("--dataset", str(prompts), "--json", str(tmp_path / "out.json"))
    before = counters()
    assert main(["bench", "--url", served.url, *load, *files]) == 0
    said, found = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    after = counters()
    counts = {
        name: after[f"vllm:spec_decode_{name}_total"] - before[f"vllm:spec_decode_{name}_total"]
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    }
    assert found["spec_decode_num_drafts"] == counts["num_drafts"] > 0
    assert found["spec_decode_draft_tokens"] == counts["num_draft_tokens"]
    assert found["spec_decode_accepted_tokens"] == counts["num_accepted_tokens"]
    rates = found["spec_decode_per_position_acceptance_rates"]
    assert len(rates) == NUM_NODES and rates == sorted(rates, reverse=True)
    accepted = counts["num_accepted_tokens"]
    assert sum(rates) * counts["num_drafts"] == pytest.approx(accepted)
    # Tokens of steps: all but the first of each answer.
    num_decoded = found["total_output_tokens"] - found["completed"]
    a_step = num_decoded / (num_decoded - accepted)
    assert found["spec_decode_tokens_per_step"] == pytest.approx(a_step)
    assert f"which gave {a_step:.2f} tokens" in said
    assert (
        f"accepted by place {' '.join(f'{100 * rate:.0f}' for rate in rates)} % of drafts" in said
    )


def test_a_request_may_do_without_drafts(served: Any) -> None:
    body = {**requests()[3], "return_token_ids": True}
    with httpx.Client(base_url=served.url, timeout=60) as http:

        def answer(**more: Any) -> Any:
            answer = http.post("/v1/completions", json={**body, **more})
            assert answer.status_code == 200, answer.text
            return [choice["token_ids"] for choice in answer.json()["choices"]]

        plain = answer(speculative="off")
        start = settled(http)
        assert answer(speculative=False) == plain
        after = settled(http)
        assert (
            after["vllm:spec_decode_num_drafts_total"] == start["vllm:spec_decode_num_drafts_total"]
        )
        assert answer(speculative={"num_speculative_tokens": 2}) == plain
        cut = settled(http)
        positions = [
            cut[name] > after[name]
            for name in (
                f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{at}]" for at in range(4)
            )
        ]
        assert positions == [True, True, False, False]
        assert answer(speculative={"num_speculative_tokens": 2000}) == answer() == plain
        refused = http.post("/v1/completions", json={**body, "speculative": "on"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "speculative"


def settled(http: httpx.Client) -> Samples:
    """Metrics that were made after this call began."""
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        found = samples(http.get("/metrics").text)
        if found["pegboard_engine_metrics_age_seconds"] < asked - began:
            return found
        assert asked < began + 30
        time.sleep(0.1)


def fresh(http: httpx.Client, name: str, expected: Samples) -> Samples:
    """Metrics that know of all that was answered: an engine pushes them once a second."""
    for _ in range(300):
        found = samples(http.get("/metrics").text)
        if found.get(name, 0) >= expected[name]:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{name}: {found.get(name)}, of {expected[name]}")


@pytest.mark.parametrize("width", [1, 2])
def test_draft_tokens_are_those_that_were_verified_and_not_the_depths_tried(
    config: dict[str, Any], width: int
) -> None:
    """All guesses are wrong: at each draft the first depth is tried, and none is accepted."""
    observer, num_tokens = MetricsObserver(CONTEXT), 10
    prompt, params = (
        (7, 8, 9),
        SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True),
    )
    outputs: Outputs = {(prompt, 0): (500,) * num_tokens}
    drafting = {**config, "drafter": VERIFIES_ALL}
    drafter = GuessingDrafter(outputs, right=0.0, width=width)
    with Engine(drafting, observer=observer, drafter=drafter) as engine:
        engine.submit(prompt, params)
        while engine.has_work():
            engine.step()
    # A draft is cut where the sequence ends: the last token needs no guess.
    nodes = [min(NUM_NODES, num_tokens - at - 1) // width * width for at in range(1, num_tokens)]
    drafts = [count for count in nodes if count]
    found = samples(observer.render())
    for name, value in (
        ("num_drafts_total", len(drafts)),
        ("num_draft_tokens_total", sum(drafts)),
        ("num_accepted_tokens_total", 0),
    ):
        assert found[f"vllm:spec_decode_{name}"] == value, name
    assert found["pegboard_spec_decode_num_tried_tokens_per_pos_total[0]"] == len(drafts)
    assert found["pegboard_spec_decode_num_tried_tokens_per_pos_total[1]"] == 0
    assert found["pegboard_spec_decode_num_proposed_tokens_total"] == sum(drafts)
