"""The code of a number is the nearest one, for every code and every middle between two."""

from __future__ import annotations

import math

import pytest
import torch

from pegboard_fp8.e4m3 import to_e4m3


def value_of(code: int) -> float:
    """By the format's definition: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


FINITE = [code for code in range(256) if code & 0x7F != 0x7F]


def codes_of(numbers: list[float]) -> list[int]:
    codes: list[int] = to_e4m3(torch.tensor(numbers)).view(torch.uint8).tolist()
    return codes


def test_every_code_is_its_value_and_the_value_is_its_code() -> None:
    values = [value_of(code) for code in FINITE]
    stored = torch.tensor(FINITE, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert stored.float().tolist() == values
    assert codes_of(values) == FINITE


@pytest.mark.parametrize("sign", [0x00, 0x80])
def test_a_middle_goes_to_the_even_code_and_the_next_number_does_not(sign: int) -> None:
    for code in range(0x7E):
        middle = (value_of(code) + value_of(code + 1)) / 2
        below, above = math.nextafter(middle, 0), math.nextafter(middle, 1e9)
        around = [float(torch.tensor(one)) for one in (below, middle, above)]
        around[0] = math.nextafter(middle, 0) if around[0] != middle else middle * (1 - 2**-23)
        around[2] = middle * (1 + 2**-23)
        expected = [code, code + code % 2, code + 1]
        got = codes_of([-one if sign else one for one in around])
        assert got == [one | sign for one in expected]


@pytest.mark.parametrize("number", [449.0, 464.0, 464.1, 480.0, 1e30, math.inf])
def test_what_is_too_large_is_the_largest(number: float) -> None:
    assert codes_of([number, -number]) == [0x7E, 0xFE]


def test_bfloat16_and_float64_are_rounded_as_the_float32_they_are() -> None:
    numbers = torch.linspace(-500, 500, 4001).bfloat16()
    expected = to_e4m3(numbers.float()).view(torch.uint8)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(to_e4m3(numbers.to(dtype)).view(torch.uint8), expected)
