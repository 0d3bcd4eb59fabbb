"""The torch kernels against formulas written another way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pegboard.builtin.torch_kernels import torch_kernel
from pegboard.interfaces.kernel import OPERATIONS, REJECTION_OPERATIONS, KernelContext
from pegboard.interfaces.quantizer import LinearWeight

DTYPES = ["float64", "float32", "bfloat16", "float16"]


def kernel(operation: str, dtype: str = "float64") -> Any:
    return torch_kernel(KernelContext(operation, "float", dtype, "cpu", 1))


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", (*OPERATIONS, *REJECTION_OPERATIONS))
def test_self_test_passes(operation: str, dtype: str) -> None:
    kernel(operation, dtype).self_test()


@pytest.mark.parametrize(
    ("operation", "function"),
    [
        ("linear", "linear"),
        ("rms_norm", "rms_norm"),
        ("rotary", "rotate"),
        ("silu_mul", "silu_mul"),
    ],
)
def test_self_test_finds_a_wrong_result(
    operation: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = kernel(operation, "float32")
    right = getattr(wrong, function)
    monkeypatch.setattr(wrong, function, lambda *args: right(*args) * 1.1)
    with pytest.raises(AssertionError):
        wrong.self_test()


def test_linear_and_rows_of_one_weight() -> None:
    w, x = normal(7, 5), normal(3, 5)
    linear = kernel("linear")
    assert linear.gathers
    packed = linear.prepare(LinearWeight("float", (7, 5), values=w))
    expected = (x[:, None, :] * w[None]).sum(-1)
    assert torch.allclose(linear.linear(x, packed), expected, atol=1e-12)
    assert torch.equal(linear.gather_rows(packed, torch.tensor([6, 0, 6])), w[[6, 0, 6]])


def test_rms_norm_is_the_formula() -> None:
    x, residual, weight = normal(4, 24), normal(4, 24).flip(0), normal(24)
    expected = torch.nn.functional.rms_norm(x, (24,), weight, 1e-5)
    norm = kernel("rms_norm")
    assert torch.allclose(norm.rms_norm(x, weight, 1e-5), expected, atol=1e-12)
    assert torch.allclose(norm.rms_norm(x[:, None], weight, 1e-5)[:, 0], expected, atol=1e-12)
    total = x + residual
    normed, added = norm.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(added, total)
    assert torch.allclose(normed, norm.rms_norm(total, weight, 1e-5), atol=1e-12)


def test_rms_norm_squares_in_float32() -> None:
    big = torch.full((1, 8), 300.0, dtype=torch.float16)  # its square overflows
    normed = kernel("rms_norm", "float16").rms_norm(big, torch.ones(8, dtype=torch.float16), 1e-5)
    assert torch.allclose(normed.float(), torch.ones(1, 8), atol=1e-3)


def test_rotation_is_multiplication_of_complex_numbers() -> None:
    x, positions = normal(5, 3, 10), torch.tensor([4, 0, 9, 9, 1])
    angles = torch.outer(torch.arange(10.0, dtype=torch.float64), torch.tensor([1.0, 0.1, 0.01, 2]))
    turned = torch.complex(x[..., :4], x[..., 4:8])
    turned = turned * torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    got = kernel("rotary").rotate(x, positions, angles.cos(), angles.sin())
    assert torch.allclose(got[..., :4], turned.real, atol=1e-12)
    assert torch.allclose(got[..., 4:8], turned.imag, atol=1e-12)
    assert torch.equal(got[..., 8:], x[..., 8:])


def test_half_precision_is_rotated_in_float32() -> None:
    x = normal(6, 2, 8).bfloat16()
    angles = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.3, 0.1, 0.03]))
    rotary, positions = kernel("rotary", "bfloat16"), torch.arange(6)
    exact = rotary.rotate(x.float(), positions, angles.cos(), angles.sin())
    assert torch.equal(rotary.rotate(x, positions, angles.cos(), angles.sin()), exact.bfloat16())


def test_silu_mul_is_the_formula() -> None:
    gate, up = normal(3, 8) * 4, normal(3, 8).flip(1)
    expected = gate / (1 + torch.exp(-gate)) * up
    assert torch.allclose(kernel("silu_mul").silu_mul(gate.clone(), up), expected, atol=1e-12)
