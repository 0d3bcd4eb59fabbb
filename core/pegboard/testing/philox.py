"""Philox4x32-10 (Salmon et al. 2011) and the noise and choice of `SampleKernel.sample`, in numpy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = NDArray[np.uint64]


def philox4x32_10(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> list[Words]:
    """The four output words of each counter. Words are uint64 arrays below 2**32, equally long."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def gumbel(vocab_size: int, seed: int, position: int, index: int) -> NDArray[np.float32]:
    """The noise of every token id at one position of one sequence, float32 [vocab_size]."""
    ids = np.arange(vocab_size, dtype=np.uint64)
    same = np.ones_like(ids)
    counter = (ids, same * np.uint64(position), same * np.uint64(index), same * np.uint64(0))
    word = philox4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32))[0]
    uniform = (word.astype(np.float64) + 0.5) / 2.0**32
    return (-np.log(-np.log(uniform))).astype(np.float32)


def kept_ids(
    z: NDArray[np.float32], top_k: int, top_p: float, min_p: float
) -> tuple[NDArray[np.int64], float]:
    """Ids that pass the filters, most likely first, and how near the closest decision was.

    Args:
        z: float32 [vocab_size], logits divided by the temperature.
        top_k, top_p, min_p: as in `SamplingParams`.

    Returns:
        The ids, and the least distance of a cumulative probability from `top_p` or of a z from the
        bound of `min_p`: where it is tiny, rounding may decide the other way.
    """
    order = np.lexsort((np.arange(len(z)), -z.astype(np.float64)))
    order = order[np.isfinite(z[order])]
    margin = math.inf
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        weights = np.exp(z[order].astype(np.float64) - float(z[order[0]]))
        reached = np.cumsum(weights) / weights.sum()
        margin = float(np.abs(reached - top_p).min())
        order = order[: int(np.argmax(reached >= top_p)) + 1]
    if min_p > 0.0:
        above = z[order].astype(np.float64) - (float(z[order[0]]) + math.log(min_p))
        margin = min(margin, float(np.abs(above).min()))
        order = order[above >= 0.0]
    return order, margin
