"""Linear layers: the right product, and the same bits of a row in any batch, on any thread."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pegboard.interfaces.kernel import KernelContext, PackedWeight
from pegboard.interfaces.quantizer import LinearWeight
from pegboard_cpu.linear import CPULinear

SHAPES = ((517, 40), (960, 577), (3, 200), (33, 1000), (1, 1), (130, 193))
"""[out_features, in_features]: no multiples of a panel or a block, and less than one of each."""

BATCHES = (*range(1, 41), 100)


def kernel(num_threads: int = 1) -> CPULinear:
    return CPULinear(KernelContext("linear", "float", "float32", "cpu", num_threads))


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prepare(weight: torch.Tensor) -> PackedWeight:
    out_features, in_features = weight.shape
    return kernel().prepare(LinearWeight("float", (out_features, in_features), values=weight))


def assert_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Within the error bound of a sum of in_features float32 products (Higham 2002, section 3.1)."""
    expected = x.double() @ weight.double().T
    bound = x.double().abs() @ weight.double().abs().T * (weight.shape[1] + 1) * 2.0**-24
    assert y.dtype == torch.float32 and y.shape == expected.shape
    assert bool(((y - expected).abs() <= bound).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_product_of_any_number_of_rows(shape: tuple[int, int]) -> None:
    weight, x = random(*shape), random(100, shape[1], seed=2)
    packed = prepare(weight)
    for num_rows in BATCHES:
        y = kernel(1 + num_rows % 4).linear(x[:num_rows], packed)
        assert_product(y, x[:num_rows], weight)


def test_rows_that_do_not_fit_the_cache_at_once() -> None:
    weight, x = random(70, 3000), random(301, 3000, seed=2)
    packed = prepare(weight)
    y = kernel(2).linear(x, packed)
    assert_product(y, x, weight)
    assert torch.equal(y[150:190], kernel(1).linear(x[150:190], packed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_bits_of_a_row_depend_on_nothing_else(shape: tuple[int, int], num_threads: int) -> None:
    packed, x = prepare(random(*shape)), random(100, shape[1], seed=2)
    alone = torch.cat([kernel(1).linear(row[None], packed) for row in x])
    many = kernel(num_threads)
    for num_rows in BATCHES:
        start = 100 - num_rows
        assert torch.equal(many.linear(x[:num_rows], packed), alone[:num_rows])
        assert torch.equal(many.linear(x[start:], packed), alone[start:])


def test_inputs_are_summed_in_ascending_order() -> None:
    # 2**24 + 1 rounds to 2**24: a one between the large number and its negative is lost
    large, in_features = 2.0**24, 700
    packed = prepare(torch.ones(40, in_features))
    generator = torch.Generator().manual_seed(3)
    lost, kept = torch.zeros(20, in_features), torch.zeros(20, in_features)
    for row in range(20):
        first, second, third = torch.randperm(in_features, generator=generator)[:3].sort()[0]
        lost[row, first], lost[row, second], lost[row, third] = large, 1, -large
        kept[row, first], kept[row, second], kept[row, third] = large, -large, 1
    assert torch.equal(kernel(2).linear(lost, packed), torch.zeros(20, 40))
    assert torch.equal(kernel(2).linear(kept, packed), torch.ones(20, 40))


@pytest.mark.parametrize("num_rows", [1, 17])
def test_inputs_and_weights_of_any_strides(num_rows: int) -> None:
    weight, wide = random(100, 300), random(num_rows, 900, seed=2)
    packed = prepare(weight)
    for x in (wide[:, 300:600], wide[:, ::3], wide[:1, :300].expand(num_rows, 300)):
        assert_product(kernel().linear(x, packed), x, weight)
    transposed = weight.T.contiguous().T
    assert torch.equal(kernel().linear(wide[:, :300], prepare(transposed)),
                       kernel().linear(wide[:, :300], packed))  # fmt: skip


def test_no_rows() -> None:
    packed = prepare(random(10, 20))
    assert kernel(2).linear(torch.empty(0, 20), packed).shape == (0, 10)
    assert kernel(2).gather_rows(packed, torch.empty(0, dtype=torch.int64)).shape == (0, 20)


def test_callers_at_once_do_not_disturb_each_other() -> None:
    shared = kernel(2)
    weights = [random(200, 300 + i, seed=i) for i in range(4)]
    inputs = [random(3 + i, 300 + i, seed=9) for i in range(4)]
    packed = [prepare(weight) for weight in weights]
    alone = [kernel().linear(x, weight) for x, weight in zip(inputs, packed, strict=True)]

    def repeat(i: int) -> bool:
        return all(torch.equal(shared.linear(inputs[i], packed[i]), alone[i]) for _ in range(50))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(repeat, range(4)))


def test_gathered_rows_are_the_weights() -> None:
    weight = random(517, 41)
    packed, row_ids = prepare(weight), torch.tensor([516, 0, 31, 32, 0, 77])
    for num_threads in (1, 3):
        assert torch.equal(kernel(num_threads).gather_rows(packed, row_ids), weight[row_ids])
        strided = row_ids[::2]
        assert torch.equal(kernel(num_threads).gather_rows(packed, strided), weight[strided])


@pytest.mark.parametrize("row_id", [-1, 517, 520, 2**40])
def test_a_row_that_does_not_exist_is_refused(row_id: int) -> None:
    packed = prepare(random(517, 41))
    with pytest.raises(IndexError, match="0 to 516"):
        kernel().gather_rows(packed, torch.tensor([0, row_id]))


@pytest.mark.parametrize(
    "x", [torch.ones(2, 20), torch.ones(2, 22), torch.ones(2, 21, dtype=torch.float64)]
)
def test_inputs_of_another_shape_or_dtype_are_refused(x: torch.Tensor) -> None:
    packed = prepare(random(10, 21))
    with pytest.raises(AssertionError, match="21"):
        kernel().linear(x, packed)


def test_weights_of_fewer_bits_are_widened() -> None:
    weight, x = random(50, 60).bfloat16(), random(5, 60, seed=2)
    assert_product(kernel().linear(x, prepare(weight)), x, weight)


def test_a_packed_weight_keeps_no_second_copy() -> None:
    weight = random(50, 60)
    source = weakref.ref(weight)
    packed = prepare(weight)
    del weight
    assert source() is None
    assert kernel().linear(random(1, 60), packed).isfinite().all()
