"""Zeros are stored as they are, less one by field, or less one by word; labels are not always true."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.errors import CheckpointError
from pegboard_gptq.config import GPTQSettings
from pegboard_gptq.zeros import zeros_of
from pegboard_quant.bitstream import pack

BITS = st.sampled_from([2, 3, 4, 8])


def _settings(
    bits: int,
    *,
    symmetric: bool | None = False,
    less_one: bool = True,
    borrowed: bool = False,
) -> GPTQSettings:
    return GPTQSettings(bits, 32, symmetric, False, less_one, borrowed)


def _random(bits: int, least: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(least, 2**bits, (3, 32), dtype=torch.uint8, generator=generator)


@given(bits=BITS, seed=st.integers(0, 2**16))
def test_both_formats_give_back_what_was_stored(bits: int, seed: int) -> None:
    zeros = _random(bits, 1, seed)
    stored = pack(zeros - 1, bits)
    assert torch.equal(zeros_of(stored, 32, _settings(bits), "qzeros"), zeros)
    zeros = _random(bits, 0, seed)
    as_they_are = _settings(bits, less_one=False)
    assert torch.equal(zeros_of(pack(zeros, bits), 32, as_they_are, "qzeros"), zeros)


@given(bits=st.sampled_from([2, 4, 8]), seed=st.integers(0, 2**16))
def test_zeros_of_0_that_borrowed_from_their_neighbours_are_restored(bits: int, seed: int) -> None:
    """GPTQModel takes 0x1111_1111 from whole words, and no bit is lost."""
    zeros = _random(bits, 0, seed)
    ones = sum(1 << shift for shift in range(0, 32, bits))
    words = (pack(zeros, bits).long() - ones) % 2**32
    stored = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    settings = _settings(bits, borrowed=True)
    assert torch.equal(zeros_of(stored, 32, settings, "qzeros"), zeros)


@given(bits=BITS, seed=st.integers(0, 2**16))
def test_zeros_of_0_that_wrapped_in_their_fields_are_restored(bits: int, seed: int) -> None:
    zeros = _random(bits, 0, seed)
    zeros[0, 0] = 0
    stored = pack((zeros - 1) & (2**bits - 1), bits)
    logging.disable(logging.WARNING)
    try:
        assert torch.equal(zeros_of(stored, 32, _settings(bits), "qzeros"), zeros)
    finally:
        logging.disable(logging.NOTSET)


def test_a_full_field_is_0_and_never_one_more_than_codes_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored = pack(torch.tensor([[15, 3, 0, 14]], dtype=torch.uint8), 4)
    zeros = zeros_of(stored, 4, _settings(4), "model.layers.0.mlp.up_proj.qzeros")
    assert zeros.tolist() == [[0, 4, 1, 15]]
    assert "up_proj.qzeros: stored zeros of 15 are taken for 0 less one" in caplog.text


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("less_one", [True, False])
@pytest.mark.parametrize("symmetric", [True, None])
def test_symmetric_zeros_tell_their_format_whatever_the_label_says(
    bits: int, less_one: bool, symmetric: bool | None
) -> None:
    middle = 1 << (bits - 1)
    for number in (middle - 1, middle):
        stored = pack(torch.full((2, 32), number, dtype=torch.uint8), bits)
        settings = _settings(bits, symmetric=symmetric, less_one=less_one)
        assert bool((zeros_of(stored, 32, settings, "qzeros") == middle).all())


@pytest.mark.parametrize("numbers", [(7, 8), (6, 6), (0, 0)])
def test_zeros_that_cannot_be_of_a_symmetric_checkpoint_are_refused(
    numbers: tuple[int, int],
) -> None:
    fields = torch.tensor(numbers, dtype=torch.uint8).repeat(1, 4)
    with pytest.raises(
        CheckpointError, match=r"qzeros: holds zeros .* the config says sym; allowed"
    ):
        zeros_of(pack(fields, 4), 8, _settings(4, symmetric=True), "qzeros")
