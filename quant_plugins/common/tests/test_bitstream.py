"""Streams of codes, against whole numbers of any length, which have bits and no words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard_quant.bitstream import pack, pack_apart, unpack, unpack_apart
from pegboard_quant.planning import num_words, num_words_apart

codes_of = st.tuples(st.integers(1, 8), st.integers(1, 150), st.integers(0, 2**32 - 1))


def _random(bits: int, num_codes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, num_codes)
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=generator)


def _words_of(number: int, count: int) -> list[int]:
    return [(number >> (32 * word)) % 2**32 for word in range(count)]


@given(codes_of)
def test_codes_follow_each_other_bit_by_bit_across_words(case: tuple[int, int, int]) -> None:
    bits, num_codes, seed = case
    codes = _random(bits, num_codes, seed)
    words = pack(codes, bits)
    assert words.dtype == torch.int32 and words.shape == (2, num_words(num_codes, bits))
    for row, packed in zip(codes.tolist(), words.tolist(), strict=True):
        stream = sum(code << (bits * index) for index, code in enumerate(row))
        assert [word % 2**32 for word in packed] == _words_of(stream, len(packed))
    assert torch.equal(unpack(words, bits, num_codes), codes)


@given(codes_of)
def test_codes_that_stay_in_their_words_leave_the_top_bits_unused(
    case: tuple[int, int, int],
) -> None:
    bits, num_codes, seed = case
    codes, each = _random(bits, num_codes, seed), 32 // bits
    words = pack_apart(codes, bits)
    assert words.shape == (2, num_words_apart(num_codes, bits))
    for row, packed in zip(codes.tolist(), words.tolist(), strict=True):
        for index, word in enumerate(packed):
            own = row[index * each : (index + 1) * each]
            assert word % 2**32 == sum(code << (bits * i) for i, code in enumerate(own))
    assert torch.equal(unpack_apart(words, bits, num_codes), codes)


@given(codes_of)
def test_streams_run_along_either_axis(case: tuple[int, int, int]) -> None:
    bits, num_codes, seed = case
    codes = _random(bits, num_codes, seed)
    assert torch.equal(pack(codes.T, bits, axis=0), pack(codes, bits).T)
    assert torch.equal(unpack(pack(codes, bits).T, bits, num_codes, axis=0), codes.T)
    assert torch.equal(unpack_apart(pack_apart(codes, bits).T, bits, num_codes, axis=0), codes.T)


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1, 9), (9, 1), (1, 1)])
@pytest.mark.parametrize("axis", [0, 1])
def test_one_row_or_one_word_of_a_larger_tensor(shape: tuple[int, int], axis: int) -> None:
    codes = torch.arange(9, dtype=torch.uint8).repeat(9, 1)[: shape[0], : shape[1]]
    words = pack(codes, 4, axis=axis)
    rows, columns = words.shape
    larger = torch.zeros(rows + 3, columns + 3, dtype=torch.int32)
    larger[:rows, :columns] = words
    assert torch.equal(unpack(larger[:rows, :columns], 4, shape[axis], axis=axis), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_extreme_codes_do_not_reach_into_their_neighbours(bits: int) -> None:
    codes = torch.zeros(1, 64, dtype=torch.uint8)
    codes[0, ::2] = 2**bits - 1
    for turned in (codes, codes.roll(1)):
        assert torch.equal(unpack(pack(turned, bits), bits, 64), turned)
