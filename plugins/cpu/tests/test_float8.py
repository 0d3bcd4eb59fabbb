"""Linear layers of float8 weights: the bits of the float kernel on the dequantized weight."""

from __future__ import annotations

import pytest
import torch

from pegboard.interfaces.kernel import KernelContext
from pegboard.interfaces.quantizer import LinearWeight
from pegboard.testing.coded_weights import Form, coded_weight
from pegboard.testing.linear_weight import dense, seen_inputs
from pegboard_cpu.float8 import CPUFloat8
from pegboard_cpu.linear import CPULinear

FORMATS = ("float8", "float8:dynamic", "float8:static")
SHAPES = ((517, 40), (33, 1000), (1, 1), (70, 193), (16, 256))
FORMS = (Form(), Form(24), Form(128), Form(7, input_group=5), Form(24, input_group=128))


def kernel(format: str, num_threads: int = 1) -> CPUFloat8:
    return CPUFloat8(KernelContext("linear", format, "float32", "cpu", num_threads))


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def float_product(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    plain = CPULinear(KernelContext("linear", "float", "float32", "cpu", 1))
    values = dense(weight).float()
    packed = plain.prepare(LinearWeight("float", weight.shape, values=values))
    return plain.linear(seen_inputs(x, weight).float(), packed)


@pytest.mark.parametrize("format", FORMATS)
def test_bits_are_those_of_the_dequantized_weight(format: str) -> None:
    for shape in SHAPES:
        for form in FORMS:
            weight, x = coded_weight(format, shape, form, "cpu"), random(100, shape[1], seed=2)
            packed, expected = kernel(format).prepare(weight), float_product(x, weight)
            for num_rows in (1, 2, 7, 14, 33, 100):
                y = kernel(format, 1 + num_rows % 3).linear(x[-num_rows:], packed)
                assert torch.equal(y, expected[-num_rows:])


def test_every_code_is_its_number() -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    weight = LinearWeight(
        "float8",
        (3, len(codes)),
        codes=codes.view(torch.float8_e4m3fn).expand(3, -1),
        scales=torch.tensor([[1.0], [0.3], [1e-30]]),
    )
    rows = kernel("float8").gather_rows(kernel("float8").prepare(weight), torch.arange(3))
    assert torch.equal(rows, dense(weight).float())
    y = kernel("float8").linear(torch.eye(len(codes)), kernel("float8").prepare(weight))
    assert torch.equal(y.T, dense(weight).float())


def test_inputs_are_rounded_as_torch_rounds_them() -> None:
    # every float8 number, what lies half way to the next one, and a little to both sides
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[:-1] + codes[1:]) / 2
    numbers = torch.cat([codes, middles, middles * (1 + 1e-6), middles * (1 - 1e-6)])
    x = torch.cat([numbers, -numbers, torch.tensor([449.0, 1e9, -1e9, 2.0**-140])])[:, None]
    one = torch.ones(1, 1)
    weight = LinearWeight(
        "float8:static",
        (1, 1),
        codes=one.to(torch.float8_e4m3fn),
        scales=one,
        activations="static",
        input_scale=torch.ones(1),
    )
    y = kernel("float8:static").linear(x, kernel("float8:static").prepare(weight))
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(y, expected)


def test_rows_of_nan_are_nan_and_no_others() -> None:
    for format in FORMATS:
        packed = kernel(format).prepare(coded_weight(format, (20, 70), Form(), "cpu"))
        x = random(3, 70)
        clean = kernel(format).linear(x, packed)
        x[1, 33] = torch.nan
        y = kernel(format).linear(x, packed)
        assert bool(y[1].isnan().all()) and torch.equal(y[::2], clean[::2])


def test_a_weight_that_holds_nan_is_refused() -> None:
    weight = coded_weight("float8", (4, 8), Form(), "cpu")
    assert weight.codes is not None
    weight.codes[2, 3] = torch.nan
    with pytest.raises(AssertionError, match="NaN"):
        kernel("float8").prepare(weight)
