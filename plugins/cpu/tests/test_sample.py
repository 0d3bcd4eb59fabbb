"""Sampling: the very token of the formula for distributions of all shapes, in any batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pegboard.interfaces.kernel import KernelContext
from pegboard.testing.sample import NEAR, Draw, reference_token, rows_of
from pegboard_cpu.sample import CPUSample

Logits = NDArray[np.float32]
Shape = Callable[[np.random.Generator, int], Logits]

VOCAB = 49152


def sample(logits: Logits, batch: list[Draw], num_threads: int = 1) -> list[int]:
    kernel = CPUSample(KernelContext("sample", "float", "float32", "cpu", num_threads))
    tokens: list[int] = kernel.sample(torch.from_numpy(logits), rows_of(batch, "cpu")).tolist()
    return tokens


def random_draws(random: np.random.Generator, count: int) -> list[Draw]:
    return [
        Draw(
            temperature=float(random.choice([0.0, 0.2, 0.7, 1.0, 1.0, 3.0])),
            top_k=int(random.choice([0, 0, 1, 2, 50, 300, 700, 3000, 40_000, 50_000])),
            top_p=float(random.choice([1.0, 1.0, 0.0, 1e-6, 0.3, 0.9, 0.999, 0.9999])),
            min_p=float(random.choice([0.0, 0.0, 0.0, 0.01, 0.1, 1.0])),
            seed=int(random.integers(0, 2**64, dtype=np.uint64)),
            position=int(random.integers(1, 2**31)),
            index=int(random.integers(0, 9)),
        )
        for _ in range(count)
    ]


def model(random: np.random.Generator, size: int) -> Logits:
    return (4 * random.standard_normal(size)).astype(np.float32)


def flat(random: np.random.Generator, size: int) -> Logits:
    return (0.01 * random.standard_normal(size)).astype(np.float32)


def tied(random: np.random.Generator, size: int) -> Logits:
    """Few distinct values, so that filters cut among equal ones; zeros of both signs."""
    signs: Logits = random.choice(np.array([1, -1], dtype=np.float32), size)
    return (signs * np.round(2 * random.standard_normal(size)) / 2).astype(np.float32)


def equal(random: np.random.Generator, size: int) -> Logits:
    return np.full(size, -7.5, dtype=np.float32)


def masked(random: np.random.Generator, size: int) -> Logits:
    """The few ids that a grammar leaves."""
    logits = np.full(size, -np.inf, dtype=np.float32)
    ids = random.integers(0, size, 20)
    logits[ids] = random.standard_normal(20)
    return logits


def far_apart(random: np.random.Generator, size: int) -> Logits:
    """Sizes from 1e-30 to 1e30 and both signs."""
    signs: Logits = random.choice(np.array([1, -1], dtype=np.float32), size)
    return signs * (10.0 ** random.uniform(-30, 30, size)).astype(np.float32)


def peaked(random: np.random.Generator, size: int) -> Logits:
    logits = flat(random, size)
    logits[random.integers(0, size)] = 60.0
    return logits


SHAPES = [model, flat, tied, equal, masked, far_apart, peaked]


@pytest.mark.parametrize("vocab_size", [1, 3, 63, 64, 517, VOCAB])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_formula(shape: Shape, vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    batch = random_draws(random, 24)
    logits = np.stack([shape(random, vocab_size) for _ in batch])
    compared = 0
    for token, row, draw in zip(sample(logits, batch), logits, batch, strict=True):
        expected, margin = reference_token(row, draw)
        assert token == expected or margin < NEAR, f"{draw}: {token}, not {expected}"
        compared += margin >= NEAR
    assert compared >= 12


def test_noise_decides_among_equal_ids() -> None:
    """Every id can win, so that a bound of the noise that is too low would show."""
    batch = [Draw(seed=3, position=position) for position in range(1, 61)]
    logits = np.zeros((len(batch), VOCAB), dtype=np.float32)
    tokens = sample(logits, batch, num_threads=2)
    for token, row, draw in zip(tokens, logits, batch, strict=True):
        expected, margin = reference_token(row, draw)
        assert token == expected or margin < NEAR
    assert len(set(tokens)) > 55


@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"top_k": 500}, {"top_k": 999, "top_p": 0.5}])
def test_filters_keep_the_lower_ids_of_equal_ones(filters: dict[str, float]) -> None:
    """0.5 of a thousand equal probabilities is an exact sum: 500 ids, in any order of adding."""
    batch = [Draw(position=position, **filters) for position in range(1, 4001)]  # type: ignore[arg-type]
    tokens = sample(np.zeros((len(batch), 1000), dtype=np.float32), batch)
    assert set(tokens) == set(range(500))


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 100, 517, VOCAB])
def test_greedy_is_the_first_of_the_largest(vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    logits = np.round(3 * random.standard_normal((33, vocab_size))).astype(np.float32)
    logits[5:9] = -np.inf
    logits[6, vocab_size // 2] = -1e30
    logits[9:12, vocab_size - 1] = np.inf
    for row in range(20, 33):
        logits[row, random.integers(0, vocab_size, 3)] = np.nan
    greedy = [Draw(temperature=0.0)] * len(logits)
    assert sample(logits, greedy) == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}]
)
def test_what_is_not_finite(filters: dict[str, float]) -> None:
    logits = np.zeros((4, 100), dtype=np.float32)
    logits[0, [40, 70]] = np.inf
    logits[1] = -np.inf
    logits[2, 50] = np.nan
    logits[3] = -np.inf
    logits[3, 33] = -3e38
    draw = Draw(temperature=0.5, seed=1, **filters)  # type: ignore[arg-type]
    assert sample(logits[:3], [draw] * 3) == [40, 0, 0]
    assert sample(logits[3:], [Draw(seed=1, **filters)]) == [33]  # type: ignore[arg-type]


def test_a_row_draws_the_same_in_any_batch() -> None:
    random = np.random.default_rng(4)
    batch = random_draws(random, 40)
    logits = np.stack([SHAPES[row % len(SHAPES)](random, 2000) for row in range(len(batch))])
    alone = [sample(logits[row : row + 1], batch[row : row + 1])[0] for row in range(len(batch))]
    assert len(set(alone)) > 20
    for num_threads in (1, 2, 3, 4):
        assert sample(logits, batch, num_threads) == alone


def test_rows_that_lie_apart_are_read_where_they_are() -> None:
    random = np.random.default_rng(5)
    wide = np.stack([model(random, 700) for _ in range(5)])
    batch = [Draw(seed=seed) for seed in range(5)]
    kernel = CPUSample(KernelContext("sample", "float", "float32", "cpu", 1))
    expected = sample(np.ascontiguousarray(wide[:, 90:607]), batch)
    for logits in (torch.from_numpy(wide)[:, 90:607], torch.from_numpy(wide.T.copy()).T[:, 90:607]):
        assert kernel.sample(logits, rows_of(batch, "cpu")).tolist() == expected
