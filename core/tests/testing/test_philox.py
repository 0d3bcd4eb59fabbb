"""The suites' own noise is Philox4x32-10, by the known answers of its authors' library."""

from __future__ import annotations

import numpy as np
import pytest

from pegboard.testing.philox import gumbel, kept_ids, philox4x32_10

KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    a, b, c, d = (np.array([word], dtype=np.uint64) for word in counter)
    words = philox4x32_10((a, b, c, d), key)
    assert tuple(int(word[0]) for word in words) == expected


def test_gumbel_noise_has_its_mean() -> None:
    noise = gumbel(100_000, seed=12345678901234567890, position=7, index=2).astype(np.float64)
    assert abs(noise.mean() - np.euler_gamma) < 0.02
    assert abs(noise.var() - np.pi**2 / 6) < 0.05


def test_top_p_keeps_the_shortest_prefix() -> None:
    z = np.log(np.array([0.1, 0.4, 0.3, 0.2], dtype=np.float32))
    ids, margin = kept_ids(z, top_k=0, top_p=0.65, min_p=0.0)
    assert ids.tolist() == [1, 2] and margin == pytest.approx(0.05, abs=1e-6)
