"""Native kernels of weights in codes give, where inputs are whole numbers too, the bits of the plain
reference; else its numbers, within the error of a sum in another order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch

from pegboard.builtin.torch_quantized import torch_quantized_linear
from pegboard.interfaces.kernel import KernelContext, LinearKernel
from pegboard.interfaces.quantizer import LinearWeight
from pegboard.testing.coded_weights import Form, coded_weight, forms_of
from pegboard.testing.linear_weight import dense, seen_inputs
from pegboard_cpu.kernels import cpu_kernel
from pegboard_cpu.library import instruction_set

EXACT = ("uint4:grouped", "int8:grouped", "int8:dynamic", "int8:static")
SUMMED = ("uint4", "int8", "float8", "float8:dynamic", "float8:static")
SHAPES = (
    *((517, 40), (33, 1000), (1, 1)),
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((70, 193), (130, 7))),
)
"""[out_features, in_features], most of them odd."""

SIZES = (8, 16, 24, 32, 64, 96, 128, None)
"""Inputs a group."""


def forms(format: str) -> Iterator[Form]:
    yield from forms_of(format)
    for size, offset in itertools.product(SIZES, ("none", "zeros", "minima")):
        if offset == "none" or not format.startswith("float8"):
            yield Form(size, offset)  # type: ignore[arg-type]  # one of those three


def products(weight: LinearWeight, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By the native kernel, and by the reference."""
    context = KernelContext("linear", weight.format, "float32", "cpu", 1)
    native, plain = cast(LinearKernel, cpu_kernel(context)), torch_quantized_linear(context)
    return native.linear(x, native.prepare(weight)), plain.linear(x, plain.prepare(weight))


@pytest.fixture
def fused() -> None:
    if instruction_set() == "portable":
        pytest.skip("this set has no fused multiply-add")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", EXACT)
@pytest.mark.usefixtures("fused")
def test_whole_numbers_give_the_references_bits(format: str, shape: tuple[int, int]) -> None:
    x = torch.randn(7, shape[1], generator=torch.Generator().manual_seed(3))
    for form in forms(format):
        native, plain = products(coded_weight(format, shape, form, "cpu"), x)
        assert torch.equal(native, plain), form


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", EXACT)
@pytest.mark.usefixtures("fused")
def test_the_ends_of_the_range_too(format: str, shape: tuple[int, int]) -> None:
    """Every code and every input is the least or the largest; the first two rows are of one alone."""
    low, high = (0, 15) if format.startswith("uint4") else (-128, 127)
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 2, (7, shape[1]), generator=generator) * 254.0 - 127
    x[0], x[1] = 127, -128
    for form in forms(format):
        weight = coded_weight(format, shape, form, "cpu")
        assert weight.codes is not None
        ends = torch.randint(0, 2, shape, generator=generator) * (high - low) + low
        ends[0], ends[-1] = high, low
        native, plain = products(replace(weight, codes=ends.to(weight.codes.dtype)), x)
        assert torch.equal(native, plain), form


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", SUMMED)
def test_floats_give_the_references_numbers(format: str, shape: tuple[int, int]) -> None:
    x = torch.randn(7, shape[1], generator=torch.Generator().manual_seed(3))
    for form in forms(format):
        weight = coded_weight(format, shape, form, "cpu")
        native, plain = products(weight, x)
        size = seen_inputs(x, weight).abs() @ dense(magnitude(weight)).T
        assert bool(((native - plain).abs() <= 2e-6 * size).all()), form


def magnitude(weight: LinearWeight) -> LinearWeight:
    """With nothing subtracted from anything: what bounds the rounding of a sum of its parts."""
    assert weight.codes is not None
    return replace(
        weight,
        codes=weight.codes.float().abs(),
        zeros=None if weight.zeros is None else -weight.zeros.abs(),
        minima=None if weight.minima is None else weight.minima.abs(),
    )
