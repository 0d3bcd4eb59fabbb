"""Linear layers of int8 weights and int8 inputs: exact sums, and the bits of the written arithmetic."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from pegboard.interfaces.kernel import KernelContext, PackedWeight
from pegboard.interfaces.quantizer import LinearWeight
from pegboard.testing.coded_weights import Form, coded_weight
from pegboard.testing.linear_weight import dense, group_of_inputs, seen_inputs
from pegboard_cpu.w8a8 import CPUW8A8

FORMATS = ("int8:dynamic", "int8:static")
SHAPES = ((517, 40), (33, 1000), (1, 1), (70, 193), (16, 256), (130, 7))
"""[out_features, in_features]: no multiples of a panel or a block, and less than one of each."""

FORMS = {
    "int8:dynamic": (
        *(Form(), Form(32, "zeros"), Form(24, "minima"), Form(24, "zeros", shuffled=True)),
        *(Form(input_group=128), Form(7, input_group=5)),
    ),
    "int8:static": (
        *(Form(), Form(input_zero=True), Form(24, "zeros", shuffled=True, input_zero=True)),
        Form(24, "minima", input_zero=True),
    ),
}
CASES = [(format, form) for format in FORMATS for form in FORMS[format]]


def kernel(format: str, num_threads: int = 1) -> CPUW8A8:
    return CPUW8A8(KernelContext("linear", format, "float32", "cpu", num_threads))


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def constant(format: str, code: int, in_features: int) -> LinearWeight:
    weight = coded_weight(format, (37, in_features), Form(), "cpu")
    ones = torch.ones(37, 1)
    scale = None if weight.input_scale is None else torch.ones(1)
    codes = torch.full((37, in_features), code, dtype=torch.int8)
    return replace(weight, codes=codes, scales=ones, input_scale=scale)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 29])
def test_sums_at_the_ends_of_the_range_are_exact(format: str, num_rows: int) -> None:
    # sums of more than 16 bits in two products, and than 24 bits in all
    for code, number, in_features in [
        *((127, 127.0, 1027), (-128, 127.0, 1027), (-128, -127.0, 4096), (127, -127.0, 65536)),
        *((-128, 127.0, 65536), (-128, -128.0, 65536)),
    ]:
        packed = kernel(format).prepare(constant(format, code, in_features))
        x = torch.full((num_rows, in_features), number)
        whole = -127 if format == "int8:dynamic" and number == -128 else int(number)
        scale = torch.tensor(abs(number) / 127) if format == "int8:dynamic" else torch.ones(())
        expected = torch.tensor(float(code * whole * in_features)) * scale
        assert torch.equal(kernel(format).linear(x, packed), expected.expand(num_rows, 37))


def test_an_input_zero_does_not_overflow() -> None:
    weight = constant("int8:static", -128, 65536)
    packed = kernel("int8:static").prepare(replace(weight, input_zero=torch.tensor([-128.0])))
    y = kernel("int8:static").linear(torch.full((2, 65536), 255.0), packed)
    assert torch.equal(y, torch.full((2, 37), -128.0 * 255 * 65536))


def exact(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """The product in float64, whose pieces are rounded nowhere."""
    return seen_inputs(x, weight) @ dense(weight).T


@pytest.mark.parametrize(("format", "form"), CASES)
def test_product_of_any_shape(format: str, form: Form) -> None:
    for shape in SHAPES:
        weight, x = coded_weight(format, shape, form, "cpu"), random(31, shape[1], seed=2)
        y = kernel(format).linear(x, kernel(format).prepare(weight))
        size = seen_inputs(x, weight).abs() @ dense(weight).abs().T
        assert bool(((y - exact(x, weight)).abs() <= 1e-5 * size.clamp(min=0.1)).all())


@pytest.mark.parametrize(("format", "form"), CASES)
def test_bits_of_a_row_depend_on_nothing_else(format: str, form: Form) -> None:
    weight, x = coded_weight(format, (133, 77), form, "cpu"), random(150, 77, seed=2)
    packed = kernel(format).prepare(weight)
    alone = torch.cat([kernel(format).linear(row[None], packed) for row in x])
    for num_threads in (1, 3):
        many = kernel(format, num_threads)
        for num_rows in (*range(2, 32), 57, 150):
            assert torch.equal(many.linear(x[-num_rows:], packed), alone[-num_rows:])


def test_one_piece_is_rounded_three_times() -> None:
    # to float32: the sum, the product of the scales, and theirs
    weight, x = coded_weight("int8:dynamic", (40, 3000), Form(), "cpu"), random(5, 3000)
    assert weight.codes is not None and weight.scales is not None
    scale = x.abs().amax(1, keepdim=True) / 127
    sums = (x / scale).round().double() @ weight.codes.double().T
    expected = sums.float() * (scale * weight.scales.T)
    assert torch.equal(kernel("int8:dynamic").linear(x, packed_of(weight)), expected)


def packed_of(weight: LinearWeight) -> PackedWeight:
    return kernel(weight.format).prepare(weight)


def test_rows_that_do_not_fit_the_cache_at_once() -> None:
    weight, x = coded_weight("int8:dynamic", (33, 3000), Form(), "cpu"), random(700, 3000)
    packed = packed_of(weight)
    y = kernel("int8:dynamic", 2).linear(x, packed)
    for start, end in pairwise((0, 1, 300, 340, 700)):
        assert torch.equal(y[start:end], kernel("int8:dynamic").linear(x[start:end], packed))


def test_inputs_of_any_strides() -> None:
    weight, wide = coded_weight("int8:dynamic", (50, 60), Form(), "cpu"), random(7, 180)
    packed = kernel("int8:dynamic").prepare(weight)
    for x in (wide[:, 60:120], wide[:, ::3], wide[:1, :60].expand(7, 60)):
        expected = kernel("int8:dynamic").linear(x.contiguous(), packed)
        assert torch.equal(kernel("int8:dynamic").linear(x, packed), expected)


def test_groups_are_those_of_the_inputs_they_scatter_to() -> None:
    weight = coded_weight("int8:dynamic", (20, 70), Form(24, "zeros", shuffled=True), "cpu")
    ids = torch.tensor([19, 0, 7])
    rows = kernel("int8:dynamic").gather_rows(kernel("int8:dynamic").prepare(weight), ids)
    assert int(group_of_inputs(weight).max()) == 2
    assert torch.equal(rows, dense(weight)[ids].float())


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_nan_are_nan_and_no_others(format: str) -> None:
    packed = kernel(format).prepare(coded_weight(format, (20, 70), Form(), "cpu"))
    x = random(3, 70)
    clean = kernel(format).linear(x, packed)
    x[1, 33] = torch.nan
    y = kernel(format).linear(x, packed)
    assert bool(y[1].isnan().all()) and torch.equal(y[::2], clean[::2])


def test_more_inputs_than_32_bits_hold_are_refused() -> None:
    weight = coded_weight("int8:dynamic", (1, 65537), Form(), "cpu")
    with pytest.raises(AssertionError, match="65537"):
        kernel("int8:dynamic").prepare(weight)
