"""Products with weights in codes, number by number with exact fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.builtin.torch_codes import fused
from pegboard.builtin.torch_kernels import torch_kernel
from pegboard.interfaces.kernel import KernelContext
from pegboard.testing.coded_weights import Form, coded_weight
from pegboard.testing.linear_weight import group_of_inputs

FORMATS = [
    *("int8", "uint4", "float8", "int8:dynamic", "int8:static", "int8:grouped", "uint4:grouped"),
    *("float8:dynamic", "float8:static"),
]


def kernel(format: str, dtype: str = "float32") -> Any:
    return torch_kernel(KernelContext("linear", format, dtype, "cpu", 1))


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def rounded(number: Fraction) -> np.float32:
    """The nearest float32, ties to even."""
    near = np.float32(float(number))
    candidates = [near, *(np.nextafter(near, np.float32(end)) for end in (-np.inf, np.inf))]
    distance = {float(one): abs(Fraction(float(one)) - number) for one in candidates}
    least = min(distance.values())
    nearest = [one for one in candidates if distance[float(one)] == least]
    return min(nearest, key=lambda one: int(one.view(np.int32)) & 1)


def fma(a: Any, b: Any, c: Any) -> np.float32:
    return rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("format", FORMATS)
def test_self_test_passes(format: str, dtype: str) -> None:
    kernel(format, dtype).self_test()


@pytest.mark.parametrize("format", FORMATS)
def test_self_test_finds_a_wrong_result(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = kernel(format)
    right = wrong.linear
    monkeypatch.setattr(wrong, "linear", lambda *arguments: right(*arguments) * 1.01)
    with pytest.raises(AssertionError):
        wrong.self_test()


def test_a_weight_of_another_format_is_refused() -> None:
    with pytest.raises(AssertionError, match="int8"):
        kernel("uint4").prepare(coded_weight("int8", (3, 8), Form(), "cpu"))


def test_fused_products_round_once() -> None:
    a, b, c = normal(3, 500)
    # to float32, the second would round a half to even where it is a little more than a half
    a[:2], b[:2], c[:2] = 1 + 2**-12, 1 + 2**-12, torch.tensor([2.0**-60, 0])
    a[2], b[2], c[2] = 1 + 2**-23, 2.0**-24, 1
    a[3], b[3], c[3] = 1 + 2**-20, 1 - 2**-20, -1
    expected = [fma(*numbers) for numbers in zip(*(x.tolist() for x in (a, b, c)), strict=True)]
    assert fused(a, b, c).tolist() == expected


def test_fused_products_keep_infinity_and_nan() -> None:
    infinite = fused(torch.tensor([torch.inf, torch.nan]), torch.ones(2), torch.ones(2))
    assert infinite[0] == torch.inf and infinite[1].isnan()


@pytest.mark.parametrize(
    ("format", "form"),
    [
        ("int8:dynamic", Form()),
        ("int8:dynamic", Form(24, "minima", input_group=32)),
        ("int8:static", Form(8, "zeros", input_zero=True)),
        ("int8:grouped", Form(16)),
        ("uint4:grouped", Form(24, "zeros", shuffled=True)),
        ("uint4:grouped", Form(64, "minima")),
    ],
)
def test_integer_products_round_where_it_is_written(format: str, form: Form) -> None:
    weight, x = coded_weight(format, (3, 70), form, "cpu"), normal(4, 70)
    y = kernel(format).linear(x, kernel(format).prepare(weight))
    expected = [[product(row, weight, n) for n in range(3)] for row in x.numpy()]
    assert y.tolist() == expected


def product(x: Any, weight: Any, n: int) -> float:
    """One output, in Python's own numbers and single roundings of float32."""
    groups = group_of_inputs(weight).tolist()
    order = sorted(range(len(groups)), key=groups.__getitem__)
    sharing = 32 if weight.activations == "grouped" else weight.input_group or len(x)
    y = np.float32(0)
    for start in range(0, len(x), sharing):
        block = order[start : start + sharing]
        scale, q = quantized(x[block], weight)
        for group in sorted({groups[k] for k in block}):
            here = [i for i, k in enumerate(block) if groups[k] == group]
            total = sum(q[i] for i in here)
            dot = sum(q[i] * int(weight.codes[n, block[i]]) for i in here)
            if weight.zeros is not None:
                dot -= int(weight.zeros[n, group]) * total
            y = fma(dot, scale * weight.scales[n, group].numpy(), y)
            if weight.minima is not None:
                y = fma(total, scale * weight.minima[n, group].numpy(), y)
    return float(y)


def quantized(x: Any, weight: Any) -> tuple[Any, list[int]]:
    """A scale, and whole numbers without the zero."""
    if weight.activations == "static":
        scale = weight.input_scale.numpy()[0]
        zero = 0 if weight.input_zero is None else int(weight.input_zero)
        codes = [round(float(one / scale + np.float32(zero))) for one in x]
        return scale, [min(max(code, -128), 127) - zero for code in codes]
    scale = np.abs(x).max() / np.float32(127)
    return scale, [round(float(one / scale)) for one in x]


def test_inputs_so_small_that_their_scale_is_rounded_stay_in_range() -> None:
    # float32's least number and 190 of it: the scale of 190 / 127 becomes 1 of it
    least = 2.0**-149
    weight = coded_weight("int8:dynamic", (2, 4), Form(), "cpu")
    assert weight.codes is not None
    weight.codes[:] = 1
    x = torch.tensor([[190 * least, 0, 0, 0], [20 * least, 0, 0, 0]])
    y = kernel("int8:dynamic").linear(x, kernel("int8:dynamic").prepare(weight))
    assert bool((y.abs() <= 200 * least).all()) and y.isfinite().all()


def test_static_inputs_of_float8_are_cut_at_its_largest_number() -> None:
    weight = coded_weight("float8:static", (1, 1), Form(), "cpu")
    assert weight.codes is not None and weight.scales is not None
    assert weight.input_scale is not None
    weight.codes.copy_(torch.ones(1, 1).to(torch.float8_e4m3fn))
    weight.scales.fill_(1.0)
    packed = kernel("float8:static").prepare(weight)
    y = kernel("float8:static").linear(torch.tensor([[1e6], [-1e6]]), packed)
    largest = 448 * weight.input_scale
    assert torch.equal(y, torch.stack([largest, -largest]))
