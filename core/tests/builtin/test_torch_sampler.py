"""The sampler's shortcuts (bounded noise, no whole sort) give the very token of the formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pegboard.builtin import torch_sampler
from pegboard.builtin.torch_sampler import TorchSample, philox
from pegboard.interfaces.kernel import KernelContext, SampleRows

VOCAB = 20_011


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            0xD16CFE09,
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: int
) -> None:
    """Random123's kat_vectors for philox4x32-10."""
    assert philox(*(torch.tensor(word) for word in (*counter, *key))).item() == expected


def noise(seed: int, position: int, index: int) -> NDArray[np.float32]:
    """Gumbel noise of all ids by Philox in unsigned arithmetic, as the contract writes it."""
    c = [np.arange(VOCAB, dtype=np.uint64)]
    c += [np.full(VOCAB, word, dtype=np.uint64) for word in (position, index, 0)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high, low = np.uint64(32), np.uint64(0xFFFFFFFF)
        k0, k1 = (np.uint64(word) for word in key)
        c = [(p1 >> high) ^ c[1] ^ k0, p1 & low, (p0 >> high) ^ c[3] ^ k1, p0 & low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    gumbel: NDArray[np.float32] = (-np.log(-np.log((c[0] + 0.5) / 2.0**32))).astype(np.float32)
    return gumbel


def slow_token(logits: NDArray[np.float32], draw: dict[str, Any]) -> int:
    """Sorts everything, and computes all noise."""
    z = logits / np.float32(draw["temperature"])
    order = np.lexsort((np.arange(VOCAB), -z))
    if draw["top_k"]:
        order = order[: draw["top_k"]]
    share = np.exp(z[order].astype(np.float64) - z.max())
    if draw["top_p"] < 1:
        reached = np.cumsum(share) >= float(np.float32(draw["top_p"])) * share.sum()
        order = order[: int(np.argmax(reached)) + 1]
    if draw["min_p"]:
        order = order[z[order] >= z.max() + np.log(np.float32(draw["min_p"]))]
    score = np.full(VOCAB, -np.inf, dtype=np.float32)
    score[order] = (z + noise(draw["seed"], draw["position"], draw["index"]))[order]
    return int(np.argmax(score))


def draws(random: np.random.Generator, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        yield {
            "temperature": random.choice([0.2, 0.7, 1.0, 3.0]),
            "top_k": int(random.choice([0, 0, 1, 50, 3000, 50_000])),
            "top_p": random.choice([1.0, 1.0, 0.3, 0.9, 0.999]),
            "min_p": random.choice([0.0, 0.0, 0.1]),
            "seed": int(random.integers(0, 2**64, dtype=np.uint64)),
            "position": int(random.integers(1, 2**31)),
            "index": int(random.integers(0, 9)),
        }


@pytest.mark.parametrize("kind", ["model", "flat", "tied"])
def test_tokens_are_those_of_a_slow_reference(kind: str) -> None:
    random = np.random.default_rng(len(kind))
    # `flat` makes top_p look past its first prefix; `tied` makes filters cut among equal logits.
    scale = {"model": 4.0, "flat": 0.2, "tied": 2.0}[kind]
    batch = list(draws(random, 40))
    logits = (scale * random.standard_normal((len(batch), VOCAB))).astype(np.float32)
    if kind == "tied":
        logits = (np.round(logits * 2) / 2).astype(np.float32)
    got = sample(logits, batch)
    expected = [slow_token(row, draw) for row, draw in zip(logits, batch, strict=True)]
    assert got == expected
    assert len(set(expected)) > 20


def test_a_logit_beyond_the_noise_is_not_drawn_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that cannot win cost no noise: a peaked row of many ids computes only a few."""
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 77] = 60.0
    calls: list[int] = []

    def counted(*words: torch.Tensor) -> torch.Tensor:
        calls.append(words[0].numel())
        return philox(*words)

    monkeypatch.setattr(torch_sampler, "philox", counted)
    draw = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3, position=1, index=0)
    assert sample(logits, [draw]) == [77]
    assert 0 < sum(calls) < 100


def test_frequencies_are_the_softmax() -> None:
    """Chi-square over the likely ids and the rest, at 1e-6 of a false alarm."""
    random = np.random.default_rng(8)
    logits = np.full(VOCAB, -30.0, dtype=np.float32)
    logits[100:112] = random.standard_normal(12)
    count = 3000
    batch = [
        dict(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=99, position=i, index=0)
        for i in range(count)
    ]
    tokens: list[int] = []
    for first in range(0, count, 500):
        tokens += sample(np.tile(logits, (500, 1)), batch[first : first + 500])
    seen = np.bincount(np.array(tokens) - 100, minlength=12)
    share = np.exp(logits[100:112] / 0.8)
    wanted = count * share / share.sum()
    assert len(seen) == 12
    assert float(((seen - wanted) ** 2 / wanted).sum()) < 51.0  # 11 degrees of freedom


def sample(logits: NDArray[np.float32], batch: list[dict[str, Any]]) -> list[int]:
    def column(name: str, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.array([draw[name] for draw in batch], dtype=dtype))

    rows = SampleRows(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int64),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        seed=column("seed", np.uint64).view(torch.int64),
        position=column("position", np.int64),
        index=column("index", np.int64),
    )
    kernel = TorchSample(KernelContext("sample", "float", "float32", "cpu", 1))
    tokens: list[int] = kernel.sample(torch.from_numpy(logits), rows).tolist()
    return tokens
