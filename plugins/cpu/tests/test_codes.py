"""Linear layers on weights in codes: the bits of the written arithmetic, in any batch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pegboard.interfaces.kernel import KernelContext, PackedWeight
from pegboard.interfaces.quantizer import LinearWeight
from pegboard.testing.coded_weights import Form, coded_weight
from pegboard.testing.linear_weight import dense, group_of_inputs
from pegboard_cpu.codes import CPUCodes
from pegboard_cpu.weight import NativeWeight

FORMATS = ("uint4", "int8")
GROUPED = ("uint4:grouped", "int8:grouped")

SHAPES = ((517, 40), (33, 1000), (1, 1), (70, 193), (16, 256))
"""[out_features, in_features]: no multiples of a panel or a group, and less than one of each."""

FORMS = (
    *(Form(size, offset) for size in (16, 32, 64, 128, None) for offset in ("none", "zeros")),
    *(Form(size, "minima") for size in (16, 32, None)),
    *(Form(32, "zeros", shuffled=True), Form(16, "minima", shuffled=True), Form(24)),
)

BATCHES = (*range(1, 41), 100)


def kernel(format: str, num_threads: int = 1) -> CPUCodes:
    return CPUCodes(KernelContext("linear", format, "float32", "cpu", num_threads))


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of float32 numbers in one rounding: the sum in float64 rounded to odd, so that the
    second rounding cannot go wrong (Boldo and Melquiond 2008)."""
    exact, c = a.double() * b.double(), c.double()
    total = exact + c
    back = total - exact
    error = (exact - (total - back)) + (c - back)
    odd = torch.nextafter(total, error.sign() * torch.inf)
    rounded = (error != 0) & (total.view(torch.int64) % 2 == 0)
    return torch.where(rounded, odd, total).float()


def emulated(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """The product of `:grouped`, group after group, by the formula at the top of codes.inl."""
    assert weight.codes is not None and weight.scales is not None
    groups = group_of_inputs(weight)
    order = groups.argsort(stable=True)
    x, codes, groups = x[:, order], weight.codes[:, order].double(), groups[order]
    y = torch.zeros(len(x), weight.shape[0])
    for start in range(0, weight.shape[1], 32):
        block = x[:, start : start + 32]
        d = block.abs().amax(1, keepdim=True) / 127
        q = torch.where(d == 0, 0, block / d).round().clamp(-127, 127).double()
        for group in sorted(set(groups[start : start + 32].tolist())):
            own = groups[start : start + 32] == group
            total, some = q[:, own].sum(1, keepdim=True), codes[:, start : start + 32][:, own]
            dot = q[:, own] @ some.T
            if weight.zeros is not None:
                dot -= weight.zeros[:, group].double() * total
            y = fused(dot.float(), d * weight.scales[:, group], y)
            if weight.minima is not None:
                y = fused(total.float(), d * weight.minima[:, group], y)
    return y


def assert_product(y: torch.Tensor, x: torch.Tensor, weight: LinearWeight) -> None:
    """Within the error bound of a sum of float32 products (Higham 2002, section 3.1), where codes and
    offsets are summed apart."""
    assert weight.codes is not None and weight.scales is not None
    groups = group_of_inputs(weight)
    size = weight.codes.double().abs() + 8
    if weight.zeros is not None:
        size += weight.zeros[:, groups].abs()
    size *= weight.scales[:, groups].abs()
    if weight.minima is not None:
        size += weight.minima[:, groups].abs()
    bound = x.double().abs() @ size.T * (weight.shape[1] + 4) * 2.0**-24
    assert bool(((y - x.double() @ dense(weight).T).abs() <= bound).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_float_inputs_give_the_dequantized_product(format: str, shape: tuple[int, int]) -> None:
    x = random(40, shape[1])
    for form in FORMS:
        weight = coded_weight(format, shape, form, "cpu")
        assert_product(kernel(format, 2).linear(x, kernel(format).prepare(weight)), x, weight)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", GROUPED)
def test_grouped_inputs_give_the_bits_of_the_formula(format: str, shape: tuple[int, int]) -> None:
    if os.environ.get("PEGBOARD_CPU_ISA") == "portable":
        pytest.skip("this set has no fused multiply-add")
    x = random(40, shape[1])
    for form in FORMS:
        weight = coded_weight(format, shape, form, "cpu")
        y = kernel(format, 2).linear(x, kernel(format).prepare(weight))
        assert torch.equal(y, emulated(x, weight)), form


@pytest.mark.parametrize("format", FORMATS + GROUPED)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_bits_of_a_row_depend_on_nothing_else(format: str, num_threads: int) -> None:
    for shape, form in product(((517, 40), (70, 193)), (Form(32, "zeros"), Form(16, "minima"))):
        packed = kernel(format).prepare(coded_weight(format, shape, form, "cpu"))
        x = random(100, shape[1])
        alone = torch.cat([kernel(format).linear(row[None], packed) for row in x])
        for num_rows in BATCHES:
            got = kernel(format, num_threads).linear(x[-num_rows:], packed)
            assert torch.equal(got, alone[-num_rows:])


@pytest.mark.parametrize("format", FORMATS + GROUPED)
def test_rows_that_do_not_fit_the_cache_at_once(format: str) -> None:
    packed = kernel(format).prepare(coded_weight(format, (40, 3000), Form(32, "zeros"), "cpu"))
    x = random(401, 3000)
    y = kernel(format, 2).linear(x, packed)
    assert torch.equal(y[190:230], kernel(format).linear(x[190:230], packed))


@pytest.mark.parametrize("format", GROUPED)
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("group_size", [16, 32, 128])
def test_extremes_are_summed_exactly(format: str, sign: int, group_size: int) -> None:
    low, high = (0, 15) if format.startswith("uint4") else (-128, 127)
    for code, zero in product((low, high), (0.0, -128.0, 127.0, 255.0)):
        weight = coded_weight(format, (19, 512), Form(group_size, "zeros"), "cpu")
        assert weight.codes is not None and weight.scales is not None
        weight = replace(
            weight,
            codes=torch.full_like(weight.codes, code),
            scales=torch.ones_like(weight.scales),
            zeros=torch.full_like(weight.scales, zero),
        )
        x = torch.full((3, 512), 127.0 * sign)
        y = kernel(format).linear(x, kernel(format).prepare(weight))
        assert bool((y == 127 * sign * 512 * (code - zero)).all())


@pytest.mark.parametrize("format", GROUPED)
def test_inputs_of_all_sizes(format: str) -> None:
    """Nothing, halves, what is too small for its scale, and what is not finite."""
    packed = kernel(format).prepare(coded_weight(format, (19, 64), Form(32), "cpu"))
    x = torch.zeros(5, 64)
    x[1], x[2, 3], x[3, 40] = 190 * 2.0**-149, torch.nan, torch.inf
    x[4], x[4, ::32] = torch.arange(64) + 0.5, 127.0
    y = kernel(format).linear(x, packed)
    assert bool((y[0] == 0).all() and y[1].isfinite().all())
    assert not y[2:4].isfinite().any()
    # a half that is rounded the other way changes an output by a weight; fused sums by far less
    expected = emulated(x, coded_weight(format, (19, 64), Form(32), "cpu"))
    torch.testing.assert_close(y[4], expected[4], rtol=0, atol=1e-3)


def test_zeros_that_are_no_whole_numbers() -> None:
    for format in FORMATS + GROUPED:
        weight = coded_weight(format, (70, 193), Form(32, "zeros"), "cpu")
        assert weight.zeros is not None
        for zeros in (weight.zeros + 0.25, weight.zeros * 40000):
            some = replace(weight, zeros=zeros)
            packed, x = kernel(format).prepare(some), random(7, 193)
            y, expected = kernel(format).linear(x, packed), emulated(x, some)
            if format in FORMATS:
                assert_product(y, x, some)
            else:
                assert bool(((y - expected).abs() <= 2e-6 * expected.abs().max()).all())
            row_ids = torch.tensor([69, 0])
            rows = kernel(format).gather_rows(packed, row_ids)
            assert torch.equal(rows.double(), dense(some)[row_ids])


@pytest.mark.parametrize("format", FORMATS + GROUPED)
def test_gathered_rows_are_the_dequantized_weight(format: str) -> None:
    row_ids = torch.tensor([516, 0, 31, 32, 0, 77])
    for form in FORMS:
        weight = coded_weight(format, (517, 40), form, "cpu")
        for scales in (weight.scales, cast(torch.Tensor, weight.scales).half().float()):
            some = replace(weight, scales=scales)
            rows = kernel(format, 2).gather_rows(kernel(format).prepare(some), row_ids)
            assert torch.equal(rows.double(), dense(some)[row_ids])


@pytest.mark.parametrize("format", FORMATS + GROUPED)
def test_memory_is_that_of_the_codes_and_of_what_a_group_has(format: str) -> None:
    bits = 4 if format.startswith("uint4") else 8
    for form, group_bits in ((Form(32), 32), (Form(32, "zeros"), 48), (Form(32, "minima"), 64)):
        weight = coded_weight(format, (512, 1024), form, "cpu")
        packed = native(kernel(format).prepare(weight))
        assert packed.num_bytes * 8 == 512 * 1024 * (bits + group_bits / 32)
        halves = replace(weight, scales=cast(torch.Tensor, weight.scales).half().float())
        packed = native(kernel(format).prepare(halves))
        assert packed.num_bytes * 8 == 512 * 1024 * (bits + (group_bits - 16) / 32)


def native(packed: PackedWeight) -> NativeWeight:
    return cast(NativeWeight, packed)


BITS_OF_A_SET = """
import torch, hashlib
from tests.test_codes import *
for format in FORMATS + GROUPED:
    for form in FORMS:
        packed = kernel(format).prepare(coded_weight(format, (70, 193), form, "cpu"))
        y = kernel(format, 2).linear(random(13, 193), packed)
        print(format, form, hashlib.sha256(y.numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("avx512_vnni", "avx2"),
        pytest.param(("avx512_vnni", "avx512", "avx2"), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_sets_with_fused_multiply_add_give_the_same_bits(names: tuple[str, ...]) -> None:
    from pegboard_cpu.library import instruction_set

    found: dict[str, str] = {}
    for name in names:
        environment: dict[str, Any] = {**os.environ, "PEGBOARD_CPU_ISA": name}
        tell = "from pegboard_cpu.library import instruction_set as s; print(s())"
        run = [sys.executable, "-c", tell + "\n" + BITS_OF_A_SET]
        done = subprocess.run(
            run,
            cwd=Path(__file__).parents[1],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        ran, _, bits = done.stdout.partition("\n")
        found[ran] = bits
    if len(found) < 2:
        pytest.skip(f"this processor has {instruction_set()} alone")
    found.pop("portable", None)
    assert len(set(found.values())) == 1
