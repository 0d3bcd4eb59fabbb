"""The parts of a load: lengths, arrivals, prompts, and the flags that say so."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pegboard.bench.arrivals import arrival_times
from pegboard.bench.options import Lengths, parse_goodput, parse_lengths, parse_percentiles
from pegboard.bench.prompts import dataset_prompts, random_prompts
from pegboard.errors import ConfigError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)]
)
def test_gaps_have_the_rate_exactly_and_the_variation_of_a_gamma_distribution(
    burstiness: float, variation: float
) -> None:
    times = arrival_times(20_000, 50.0, burstiness, rng())
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 50)
    assert statistics.pstdev(gaps) * 50 == pytest.approx(variation, rel=0.05, abs=1e-6)


def test_poisson_counts_in_a_second_vary_as_much_as_they_are() -> None:
    times = arrival_times(20_000, 20.0, 1.0, rng())
    counts = np.bincount(np.array(times, dtype=int))[:-1]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.15)


@pytest.mark.parametrize("count", [1, 5])
def test_without_a_rate_all_come_at_once(count: int) -> None:
    assert arrival_times(count, math.inf, 1.0, rng()) == [0.0] * count


def test_a_seed_gives_the_same_arrivals() -> None:
    assert arrival_times(9, 3.0, 0.5, rng(1)) == arrival_times(9, 3.0, 0.5, rng(1))
    assert arrival_times(9, 3.0, 0.5, rng(1)) != arrival_times(9, 3.0, 0.5, rng(2))


def test_uniform_lengths_take_every_value_of_their_range_alike() -> None:
    drawn = parse_lengths("3:6", "--input-len").sample(40_000, rng())
    shares = {length: drawn.count(length) / len(drawn) for length in set(drawn)}
    assert sorted(shares) == [3, 4, 5, 6]
    assert all(share == pytest.approx(0.25, abs=0.02) for share in shares.values())


def test_lognormal_lengths_have_95_percent_inside_and_the_middle_of_the_logarithms() -> None:
    drawn = parse_lengths("lognormal:16:1024", "--input-len").sample(40_000, rng())
    assert min(drawn) == 16
    assert max(drawn) == 1024
    inside = sum(16 < length < 1024 for length in drawn) / len(drawn)
    assert inside == pytest.approx(0.95, abs=0.01)
    assert statistics.median(drawn) == pytest.approx(128, rel=0.03)


def test_one_number_is_one_length() -> None:
    assert set(parse_lengths("7", "--input-len").sample(50, rng())) == {7}


@pytest.mark.parametrize(
    "text", ["", "0", "0:5", "9:5", "a:b", "1:2:3", "-1", "normal:1:2", "9999999"]
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--output-len: .*; allowed: N, LOW:HIGH"):
        parse_lengths(text, "--output-len")


@pytest.mark.parametrize(
    "texts", [["ttft:500,itl:50"], ["ttft:500", "itl:50"], ["ttft:500 itl:50.0"]]
)
def test_targets_may_be_written_together_or_apart(texts: list[str]) -> None:
    assert parse_goodput(texts) == {"ttft": 500.0, "itl": 50.0}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-1", "latency:5", "ttft:5ms"])
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput([text])


def test_percentiles_are_ascending() -> None:
    assert parse_percentiles("99,50,99.9") == (50.0, 99.0, 99.9)


@pytest.mark.parametrize("text", ["", "x", "101", "-1", "50,,90", "nan"])
def test_other_percentiles_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--percentiles"):
        parse_percentiles(text)


def test_random_prompts_have_the_lengths_and_only_the_given_tokens() -> None:
    prompts = random_prompts([5, 8, 13], [4, 9, 200], [1, 2, 3], rng())
    assert [len(prompt.content) for prompt in prompts] == [4, 9, 200]
    assert [prompt.output_len for prompt in prompts] == [1, 2, 3]
    assert set(prompts[2].content) == {5, 8, 13}


def test_without_tokens_prompts_are_as_many_words() -> None:
    (prompt,) = random_prompts([], [40], [1], rng())
    assert isinstance(prompt.content, str)
    assert len(prompt.content.split(" ")) == 40


def test_a_dataset_is_read_in_order_and_again_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "output_tokens": 3}\n\n{"prompt": [1, 2], "category": "x"}\n')
    prompts = dataset_prompts(file, 5, Lengths(7, 7), rng())
    assert [prompt.content for prompt in prompts] == ["a", [1, 2], "a", [1, 2], "a"]
    assert [prompt.output_len for prompt in prompts] == [3, 7, 3, 7, 3]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ('{"text": "a"}', "line 2.*prompt"),
        ('{"prompt": ""}', "line 2: an empty prompt"),
        ('{"prompt": 5}', "line 2"),
        ('{"prompt": "a", "output_tokens": 0}', "line 2: output_tokens is 0"),
        ('{"prompt": "\\ud800"}', "line 2"),
    ],
)
def test_a_line_of_another_kind_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=said):
        dataset_prompts(file, 5, Lengths(7, 7), rng())


@pytest.mark.parametrize("content", [None, "\n"])
def test_a_dataset_that_is_missing_or_empty_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="--dataset"):
        dataset_prompts(file, 5, Lengths(7, 7), rng())
