"""Small operations: the formula at odd sizes and strides, and the same bits of a row in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pegboard.interfaces.kernel import KernelContext
from pegboard_cpu.kernels import cpu_kernel

WIDTHS = (1, 7, 24, 33, 576, 1000)
THREADS = (1, 2, 3, 4)


def kernel(operation: str, num_threads: int = 1) -> Any:
    return cpu_kernel(KernelContext(operation, "float", "float32", "cpu", num_threads))


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a few roundings of a float64 reference, element by element."""
    assert got.dtype == torch.float32 and got.shape == expected.shape
    assert torch.allclose(got.double(), expected, rtol=1e-6, atol=1e-30)


def norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_at_odd_sizes(width: int) -> None:
    x, weight = normal(5, width), normal(width, seed=2)
    close(kernel("rms_norm").rms_norm(x, weight, 1e-5), norm_reference(x, weight, 1e-5))


def test_rms_norm_of_heads_within_a_joined_product() -> None:
    """As a model with norms of queries and keys calls it: heads of a slice of each row."""
    joined, weight = normal(7, 3 * 24 + 50), normal(24, seed=2)
    before = joined.clone()
    heads = joined[:, 30 : 30 + 72].view(7, 3, 24)
    close(kernel("rms_norm").rms_norm(heads, weight, 1e-6), norm_reference(heads, weight, 1e-6))
    assert torch.equal(joined, before)


def test_rms_norm_of_columns_and_of_higher_dimensions() -> None:
    weight = normal(24, seed=2)
    for x in (normal(24, 6).T, normal(2, 3, 4, 24), normal(24)):
        close(kernel("rms_norm").rms_norm(x, weight, 1e-5), norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("width", WIDTHS)
def test_sum_and_norm_in_one_pass(width: int) -> None:
    x, residual, weight = normal(5, width), normal(5, width, seed=2), normal(width, seed=3)
    total = x + residual
    normed, added = kernel("rms_norm").add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(added, total)
    close(normed, norm_reference(total, weight, 1e-5))


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul_of_halves_of_a_joined_product(width: int) -> None:
    gate, up = torch.split(6 * normal(9, 2 * width), width, dim=1)
    wide = gate.double()
    expected = wide / (1 + torch.exp(-wide)) * up.double()
    close(kernel("silu_mul").silu_mul(gate, up), expected)


def test_silu_of_every_size_of_number() -> None:
    gate = torch.cat([torch.linspace(-90, 90, 200_001), torch.tensor([-3e38, 3e38, -0.0, 1e-38])])
    got = kernel("silu_mul").silu_mul(gate[None], torch.ones(1, len(gate)))[0]
    expected = gate.double() / (1 + torch.exp(-gate.double()))
    assert torch.allclose(got.double(), expected, rtol=1e-6, atol=1e-30)
    infinite = torch.tensor([[torch.inf, torch.nan]])
    silu = kernel("silu_mul").silu_mul(infinite, torch.ones(1, 2))
    assert silu[0, 0] == torch.inf and silu[0, 1].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("head_dim", "half"), [(24, 12), (80, 40), (64, 16), (7, 3), (2, 1)])
def test_rotation_is_multiplication_of_complex_numbers(
    head_dim: int, half: int, dtype: torch.dtype
) -> None:
    joined = normal(6, 3 * head_dim + 5)
    x = joined[:, 2 : 2 + 3 * head_dim].view(6, 3, head_dim)
    angles = torch.outer(torch.arange(50.0), 10.0 ** -torch.arange(half)).to(dtype)
    positions = torch.tensor([0, 49, 7, 7, 1, 30])
    turns = torch.polar(torch.ones_like(angles).double(), angles.double())[positions][:, None]
    turned = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double()) * turns
    got = kernel("rotary").rotate(x, positions, angles.cos(), angles.sin())
    assert torch.allclose(got[..., :half].double(), turned.real, atol=1e-6)
    assert torch.allclose(got[..., half : 2 * half].double(), turned.imag, atol=1e-6)
    assert torch.equal(got[..., 2 * half :], x[..., 2 * half :])


def rms_norm(x: torch.Tensor, num_threads: int) -> torch.Tensor:
    normed: torch.Tensor = kernel("rms_norm", num_threads).rms_norm(x, normal(577, seed=8), 1e-5)
    return normed


def add_rms_norm(x: torch.Tensor, num_threads: int) -> torch.Tensor:
    parts = kernel("rms_norm", num_threads).add_rms_norm(
        x.clone(), x.flip(1).contiguous(), normal(577, seed=8), 1e-5
    )
    return torch.cat(parts, dim=1)


def silu_mul(x: torch.Tensor, num_threads: int) -> torch.Tensor:
    product: torch.Tensor = kernel("silu_mul", num_threads).silu_mul(x, x.flip(1))
    return product


@pytest.mark.parametrize("operation", [rms_norm, add_rms_norm, silu_mul])
def test_a_row_has_the_same_bits_in_any_batch(
    operation: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    x = 3 * normal(100, 577)
    alone = torch.cat([operation(row[None], 1) for row in x])
    for num_threads in THREADS:
        for batch in (2, 3, 7, 33, 100):
            pieces = [operation(piece, num_threads) for piece in torch.split(x, batch)]
            assert torch.equal(torch.cat(pieces), alone)


def test_an_element_has_the_same_bits_anywhere_in_its_row() -> None:
    """The last elements of a row do not fill a vector."""
    x = 5 * normal(1, 100)
    whole = kernel("silu_mul").silu_mul(x, x)
    for start in range(1, 99):
        part = x[:, start:].contiguous()
        assert torch.equal(kernel("silu_mul").silu_mul(part, part), whole[:, start:])
