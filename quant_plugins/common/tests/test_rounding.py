"""Rounding to nearest: the formulas, and that no other code would be nearer."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard_quant.codes import canonical
from pegboard_quant.planning import code_format
from pegboard_quant.rounding import round_to_nearest
from pegboard_quant.schemes import dequantized

Zeros = Literal["middle", "fitted"]


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    size=st.sampled_from([-1, 32, 64]),
    zeros=st.sampled_from(["middle", "fitted"]),
    columns=st.sampled_from([32, 96, 100]),
    seed=st.integers(0, 2**16),
)
def test_every_code_is_the_nearest_that_there_is(
    bits: int, size: int, zeros: Zeros, columns: int, seed: int
) -> None:
    values = torch.randn(5, columns, generator=torch.Generator().manual_seed(seed))
    codes = round_to_nearest(values, bits, size, zeros, torch.float16)
    group = torch.arange(columns) // codes.group_size
    scale, zero = codes.scales.double()[:, group], codes.zeros.double()[:, group]
    every = torch.arange(2**bits).double()
    errors = ((every - zero.unsqueeze(-1)) * scale.unsqueeze(-1) - values.unsqueeze(-1)).abs()
    own = errors.gather(-1, codes.values.long().unsqueeze(-1)).squeeze(-1)
    assert bool((own <= errors.amin(-1) * (1 + 1e-5) + 1e-6).all())
    loaded = dequantized(canonical(codes, code_format(bits, "float")))
    assert torch.allclose(loaded.double(), (codes.values.double() - zero) * scale, atol=1e-6)


def test_the_numbers_of_a_group_are_those_of_the_formulas() -> None:
    values = torch.tensor([[-1.0, 0.5, 2.0, 0.0]])
    fitted = round_to_nearest(values, 4, -1, "fitted")
    assert fitted.scales.item() == pytest.approx(3.0 / 15) and fitted.zeros.item() == 5
    assert fitted.values.tolist() == [[0, 7, 15, 5]]  # 0.5 / 0.2 is 2.5, to even: 2
    middle = round_to_nearest(values, 4, -1, "middle")
    assert middle.scales.item() == pytest.approx(4.0 / 15) and middle.zeros.item() == 8
    assert middle.values.tolist() == [[4, 10, 15, 8]]


@pytest.mark.parametrize("zeros", ["middle", "fitted"])
def test_groups_of_zeros_and_of_what_is_too_small_to_store_stay_finite(zeros: Zeros) -> None:
    values = torch.zeros(2, 64)
    values[1] = 1e-9
    codes = round_to_nearest(values, 4, 32, zeros, torch.float16)
    weight = dequantized(canonical(codes, "uint4"))
    assert bool(codes.scales.isfinite().all()) and bool((weight == 0).all())
