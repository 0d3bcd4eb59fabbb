"""Uniform numbers for rejections: functions of seed, sequence and position, as the noise of sampling is.

Their Philox counters end in 1, those of the noise in 0: the two share nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pegboard.step import Int64

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10

_UNUSED_BITS = np.uint64(11)
"""Of 64; a float64 holds the others without rounding."""


def uniforms(seed: NDArray[np.uint64], position: Int64, index: Int64) -> NDArray[np.float64]:
    """Two numbers from 0 to below 1 for each position of a sequence, float64 [n, 2].

    They are the words of Philox4x32-10 (Salmon et al. 2011), two a number, with key (low, high word of
    the seed) and counter (0, position, index, 1).
    """
    key0, key1 = seed & _LOW, seed >> _HALF
    words = [np.zeros_like(seed), position.astype(np.uint64), index.astype(np.uint64)]
    c0, c1, c2, c3 = *words, np.ones_like(seed)
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _HALF) ^ c1 ^ key0, product1 & _LOW
        c2, c3 = (product0 >> _HALF) ^ c3 ^ key1, product0 & _LOW
        key0, key1 = (key0 + _WEYL[0]) & _LOW, (key1 + _WEYL[1]) & _LOW
    pairs = np.stack((c0 << _HALF | c1, c2 << _HALF | c3), axis=1)
    return (pairs >> _UNUSED_BITS).astype(np.float64) * 2.0**-53
