"""The benchmarks of prefix caches and policies: traces share what they claim, bounds are bounds, and
every part runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.testing.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "examples" / "bench"
sys.path.insert(0, str(BENCH))

import speed_summary  # noqa: E402
from host_parts import make_parts  # noqa: E402
from quant_tables import FLOAT, WEIGHTS, full, short  # noqa: E402
from replay import (  # noqa: E402
    Blocks,
    MakeParts,
    belady,
    blocks_of,
    hit_rate,
    num_distinct,
    optimum,
    replay,
)
from simulation import BEGIN_S, BLOCK_BYTES, StepCost, simulate  # noqa: E402
from thin_model import write_thin_model  # noqa: E402
from traces import KINDS, TraceRequest, Workload, make_trace, write_trace  # noqa: E402

SMALL = Workload(num_requests=120, think_s=0.5, scale=0.2, max_len=1000)
BLOCK = 2


def request(
    prompt: Sequence[int], answer: Sequence[int] = (7,), arrival_s: float = 0.0
) -> TraceRequest:
    tokens, answered = np.array(prompt, np.int32), np.array(answer, np.int32)
    return TraceRequest(arrival_s, tokens, answered, "system", 0, "", 1)


def begins_with(one: TraceRequest, other: TraceRequest) -> bool:
    """Whether a prompt begins with another one and its answer."""
    known = np.concatenate((other.prompt, other.answer))
    return len(one.prompt) > len(known) and bool((one.prompt[: len(known)] == known).all())


class TestTraces:
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_seed_gives_one_trace(self, kind: str, tmp_path: Path) -> None:
        files = [tmp_path / name for name in ("one", "same", "other")]
        for seed, file in zip((3, 3, 4), files, strict=True):
            write_trace(file, make_trace(kind, seed, SMALL))
        one, same, other = (file.read_text() for file in files)
        assert one == same != other

    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_what_was_asked_for(self, kind: str) -> None:
        trace = make_trace(kind, 0, SMALL)
        assert len(trace) == SMALL.num_requests
        arrivals = [request.arrival_s for request in trace]
        assert arrivals == sorted(arrivals) and arrivals[0] >= 0
        assert arrivals[-1] == pytest.approx(SMALL.num_requests / SMALL.rate, rel=0.5)
        for one in trace:
            assert len(one.prompt) and len(one.answer)
            assert len(one.prompt) + len(one.answer) <= SMALL.max_len
            assert one.prompt.min() >= 100 and one.prompt.max() < SMALL.vocab_size

    def test_system_prompts_are_shared_and_some_are_popular(self) -> None:
        trace = make_trace("system", 0, Workload(num_requests=600))
        counts = Counter(tuple(request.prompt[:16]) for request in trace)
        assert 60 < len(counts) <= 100
        assert max(counts.values()) > 4 * np.median(list(counts.values()))

    def test_few_shot_prompts_share_examples_from_the_first_on(self) -> None:
        trace = make_trace("few_shot", 0, Workload(num_requests=200))
        assert len({tuple(request.prompt[:8]) for request in trace}) == 1
        requests = blocks_of(trace, 16)
        hits = optimum(requests, 16)
        assert sum(hit > 200 for hit in hits[100:]) > 80, "most find two examples at least"

    def test_a_turn_begins_with_the_turn_before_and_its_answer(self) -> None:
        last: dict[int, TraceRequest] = {}
        num_later = 0
        for turn in make_trace("multi_turn", 0, SMALL):
            if turn.session in last:
                num_later += 1
                assert begins_with(turn, last[turn.session])
            last[turn.session] = turn
        assert num_later > SMALL.num_requests / 2

    def test_agents_calls_branch_from_their_parents(self) -> None:
        sessions: dict[int, list[TraceRequest]] = {}
        num_children: Counter[int] = Counter()
        for call in make_trace("agents", 0, SMALL):
            before = sessions.setdefault(call.session, [])
            parents = [parent for parent in before if begins_with(call, parent)]
            assert bool(parents) == bool(before)
            if parents:
                num_children[id(max(parents, key=lambda parent: len(parent.prompt)))] += 1
            before.append(call)
        assert max(num_children.values()) > 1

    def test_a_mix_has_all_kinds(self) -> None:
        assert {one.kind for one in make_trace("mix", 0, SMALL)} == set(KINDS) - {"mix"}


TOKENS = st.integers(0, 1)
REQUESTS = st.lists(
    st.builds(
        request,
        st.lists(TOKENS, min_size=1, max_size=9),
        st.lists(TOKENS, min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=7,
)


def largest(requests: Sequence[Blocks]) -> int:
    return max(request.num_blocks for request in requests)


def exhaustive(requests: Sequence[Blocks], num_blocks: int) -> int:
    """Most blocks that can be hit, over everything that could be evicted."""
    parents = {
        child: parent
        for request in requests
        for parent, child in zip(request.ids, request.ids[1:], strict=False)
    }

    def remaining(cached: frozenset[int], held: set[int], num_evicted: int) -> list[frozenset[int]]:
        """The blocks that can be left: beginnings outlive what follows them."""
        left = [cached - set(gone) for gone in combinations(cached - held, num_evicted)]
        return [kept for kept in left if all(parents.get(one, one) in kept for one in kept)]

    @cache
    def best(number: int, cached: frozenset[int]) -> int:
        if number == len(requests):
            return 0
        request, num_hit = requests[number], 0
        while num_hit < request.num_usable and request.ids[num_hit] in cached:
            num_hit += 1
        missing = request.num_blocks - num_hit - (num_blocks - len(cached))
        choices = remaining(cached, set(request.ids[:num_hit]), max(0, missing))
        return num_hit + max(best(number + 1, kept | set(request.ids)) for kept in choices)

    return best(0, frozenset())


class TestReplay:
    @pytest.fixture(scope="class")
    def caches(self) -> dict[str, MakeParts]:
        return {
            eviction: make_parts({"name": "trie", "options": {"eviction": eviction}}, BLOCK)
            for eviction in ("lru", "priority")
        }

    @given(REQUESTS, st.integers(0, 3))
    def test_belady_is_the_best_of_all_choices(self, trace: list[TraceRequest], more: int) -> None:
        requests = blocks_of(trace, BLOCK)
        num_blocks = max(1, largest(requests)) + more
        assert sum(belady(requests, num_blocks, BLOCK)) == BLOCK * exhaustive(requests, num_blocks)

    @given(trace=REQUESTS, more=st.integers(0, 3))
    def test_optimum_belady_cache(
        self, caches: dict[str, MakeParts], trace: list[TraceRequest], more: int
    ) -> None:
        requests = blocks_of(trace, BLOCK)
        num_blocks = max(1, largest(requests)) + more
        most = sum(optimum(requests, BLOCK))
        best = sum(belady(requests, num_blocks, BLOCK))
        assert most >= best
        for make in caches.values():
            assert best >= sum(replay(trace, make, num_blocks, BLOCK))

    @pytest.mark.parametrize("kind", KINDS)
    def test_without_an_end_all_are_the_optimum(
        self, caches: dict[str, MakeParts], kind: str
    ) -> None:
        trace = make_trace(kind, 0, Workload(num_requests=40, scale=0.05))
        requests = blocks_of(trace, BLOCK)
        num_blocks = sum(request.num_blocks for request in requests)
        hits = optimum(requests, BLOCK)
        assert sum(hits) > 0
        assert belady(requests, num_blocks, BLOCK) == hits
        for make in caches.values():
            assert replay(trace, make, num_blocks, BLOCK) == hits

    def test_hits_by_hand(self, caches: dict[str, MakeParts]) -> None:
        # The last prompt token is always computed, and the last answer token never.
        trace = [request([1, 2, 3, 4], [5, 6]), request([1, 2, 3, 4]), request([1, 2, 3, 4, 5, 9])]
        requests = blocks_of(trace, BLOCK)
        assert [one.num_blocks for one in requests] == [3, 2, 3]
        assert num_distinct(requests) == 3
        assert optimum(requests, BLOCK) == [0, 2, 4]
        assert replay(trace, caches["lru"], 8, BLOCK) == [0, 2, 4]
        assert hit_rate(trace, [0, 2, 4]) == pytest.approx(6 / 14)

    def test_a_request_larger_than_the_pool_is_refused(self, caches: dict[str, MakeParts]) -> None:
        trace = [request(range(8))]
        with pytest.raises(ValueError, match="larger than the pool"):
            belady(blocks_of(trace, BLOCK), 3, BLOCK)
        with pytest.raises(ValueError, match="larger than the pool"):
            replay(trace, caches["lru"], 3, BLOCK)


class TestSimulation:
    COST = StepCost(fixed_s=1.0, prefill_s=0.01, decode_s=0.1)

    def test_steps_take_what_the_cost_says(self, tmp_path: Path) -> None:
        prompt = list(range(100, 164))
        # The second one begins when the first has ended, and computes its last block alone.
        trace = [request(prompt, [200, 201, 202]), request(prompt, [210], arrival_s=50.0)]
        config = {
            "model": str(write_thin_model(tmp_path / "thin")),
            "attention": "torch",
            "prefix_cache": "on",
            "max_model_len": 128,
            "kv_cache": {"block_size": 16, "memory": 100 * BLOCK_BYTES},
        }
        first, second = simulate(trace, config, self.COST)
        assert first.first_token == pytest.approx(BEGIN_S + 1.64)
        assert first.finished == pytest.approx(BEGIN_S + self.COST.alone(trace[0]))
        assert (first.num_output_tokens, first.reason) == (4, "stop")
        assert second.num_cached_tokens == 48
        assert second.first_token == pytest.approx(BEGIN_S + 51.16)


class TestQuantTables:
    """`bench_quant.py` needs the real model and peers; what it says of runs is checked here."""

    CASE = "1x128x64"

    def result(self, llama_cpp: Sequence[float] = ()) -> dict[str, Any]:
        """Runs of three rounds that take us 1, 2 and 4 seconds in each part, and float32 five times so
        long; others so many times as given."""
        ours = (1.0, 2.0, 4.0)
        seconds = {FLOAT: [5 * second for second in ours]}
        for bits in WEIGHTS:
            seconds[f"pegboard {bits}"] = list(ours)
            if llama_cpp:
                theirs = zip(ours, llama_cpp, strict=True)
                seconds[f"xllamacpp {bits}"] = [second * times for second, times in theirs]
        runs = {
            name: [
                dict.fromkeys(("total", "decode", "prefill"), one) | {"peak_rss_mb": 1.0}
                for one in of_peer
            ]
            for name, of_peer in seconds.items()
        }
        memory = {
            "import_torch": 200e6,
            "ready": 400e6,
            "peak_until_ready": 450e6,
            "weights": 100e6,
            "running": {"a prompt": {"beyond_torch": 250e6, "touched_kv": 10e6}},
            "rest": {"a prompt": 140e6},
            "added": {"tokenizer": 32e6},
        }
        return {
            "cpu": "a processor",
            "load_before": 0.1,
            "threads": 1,
            "clock": "wall time",
            "rounds": len(ours),
            "instruction_set": "avx2",
            "machine": {"cpu": "a processor", "read_gb_s_1t": 12.6},
            "memory": dict.fromkeys(WEIGHTS, memory),
            "starts": {"import_torch_s": [1.0, 2.0, 1.5], "ready_s": [2.5, 4.5, 3.0]},
            "peers": {name: {"peer": name.partition(" ")[0], "version": "1"} for name in seconds},
            "cases": {self.CASE: runs},
        }

    def rows(self, text: str) -> list[list[str]]:
        return [line.strip("| ").split(" | ") for line in text.splitlines() if "|" in line]

    def test_ratios_are_of_the_same_round_and_beside_their_aims(self) -> None:
        rows = self.rows(short(self.result(llama_cpp=(1.3, 1.2, 3.0))))
        four, eight = (row for row in rows if row[1] == "llama.cpp")
        assert four[2] == "**1.30 (1.20 to 3.00) < 1.35**"
        assert eight[2] == "1.30 (1.20 to 3.00) ≥ 1.2"
        floats = [row[2] for row in rows if row[1] == "our float32"]
        assert floats == ["5.00 (5.00 to 5.00) ≥ 3.5", "5.00 (5.00 to 5.00) ≥ 2.5"]

    def test_memory_load_and_start_are_beside_their_aims(self) -> None:
        row = next(row for row in self.rows(short(self.result())) if row[1] == "a prompt")
        assert row[2:6] == ["250", "100", "10", "**140 > 130**"]
        assert row[6:] == ["**1.25 > 1.15**", "1.50 ≤ 2"]

    def test_the_limit_is_one_reading_of_the_packed_weights_a_step(self) -> None:
        row = next(row for row in self.rows(full(self.result())) if row[1] == self.CASE)
        # 63 tokens in 2 s; 100 MB at 12.6 GB/s
        assert row[3:5] == ["32", "126 (25%)"]

    def test_peers_that_did_not_run_are_not_in_it(self) -> None:
        assert "OpenVINO" not in full(self.result(llama_cpp=(1.0, 1.0, 1.0)))
        assert "llama.cpp" not in full(self.result())


def test_the_readme_shows_the_committed_runs() -> None:
    shown = (ROOT / "README.md").read_text()
    table = speed_summary.table(speed_summary.read_results())
    assert f"<!-- speed_summary -->\n{table}\n<!-- /speed_summary -->" in shown


@pytest.mark.parametrize("name", ["bench_engine", "bench_engine_torch", "bench_quant"])
def test_the_real_run_finds_a_place_for_its_table(name: str) -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert page.count(f"<!-- {name} -->\n") == page.count(f"<!-- /{name} -->\n") == 1


PARTS = [
    ("bench_prefix", "shared"),
    ("bench_prefix", "turns"),
    ("bench_prefix", "cost"),
    ("bench_prefix", "hits"),
    ("bench_schedulers", "virtual"),
    ("bench_schedulers", "real"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.mark.parametrize(
    "bench", ["bench_schedulers", pytest.param("bench_prefix", marks=pytest.mark.slow)]
)
def test_all_parts_run(bench: str, model: Path, tmp_path: Path) -> None:
    parts = [part for name, part in PARTS if name == bench]
    page = tmp_path / "page.md"
    page.write_text(
        "".join(f"<!-- {bench}_{part} -->\n<!-- /{bench}_{part} -->\n" for part in parts)
    )
    before = (BENCH / "README.md").read_text()
    command: list[str | Path] = [sys.executable, BENCH / f"{bench}.py", "--tiny"]
    done = subprocess.run(
        [*command, "--model", model, "--out", tmp_path / "out", "--page", page],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = page.read_text()
    for part in parts:
        name = f"{bench.removeprefix('bench_')}_{part}"
        assert json.loads((tmp_path / "out" / f"{name}.json").read_text())["pegboard"]
        ET.parse(tmp_path / "out" / f"{name}.svg")
        assert f"results/{name}.svg" in written and f"results/{name}.json" in written
    assert not re.search(r"\b(nan|inf)\b", written)
    assert (BENCH / "README.md").read_text() == before
    for part in parts:
        assert f"<!-- {bench}_{part} -->" in before, (
            "the real run would find no place for its table"
        )


@pytest.mark.slow
def test_quality_is_measured_and_a_finished_scheme_is_not_made_again(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    model = write_tiny_model(tmp_path / "tiny", tokenizer=True, **sizes)
    text, page = tmp_path / "text.txt", tmp_path / "page.md"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    page.write_text("<!-- bench_quality -->\n<!-- /bench_quality -->\n")
    command: list[str | Path] = [sys.executable, BENCH / "bench_quality.py"]
    command += ["--model", model, "--calibration", text, "--text", text, "--tokens", "400"]
    command += ["--samples", "4", "--length", "64", "--work", tmp_path / "work"]
    command += ["--scheme", "gptq", "--scheme", "int8", "--out", tmp_path / "out", "--page", page]
    written = []
    for _ in range(2):
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=500)
        result = json.loads((tmp_path / "out" / "quality.json").read_text())["schemes"]
        written.append([result[name]["eval"]["wall_s"] for name in ("gptq", "int8")])
        four, eight = (result[name]["quality"]["divergence"] for name in ("gptq", "int8"))
        assert 0 < eight["kl_mean"] < four["kl_mean"]
    assert written[0] == written[1]
    for part in ("four", "eight"):
        ET.parse(tmp_path / "out" / f"quality_{part}.svg")
        assert f"results/quality_{part}.svg" in page.read_text()
    assert "<!-- bench_quality -->" in (BENCH / "README.md").read_text()
