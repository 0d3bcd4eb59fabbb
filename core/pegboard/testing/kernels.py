"""Contract suites of `Kernel`, one for each operation; those of sampling are in `testing.sample`.

    class TestMyLinear(LinearContract):
        dtypes = ("float32", "bfloat16")

        @pytest.fixture
        def make(self):
            return my_kernel                # called with a KernelContext

References are the formulas in float64. A kernel that promises `row_invariant` sets the attribute of
that name, and its rows are compared bit for bit across batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pegboard.interfaces.kernel import Kernel, KernelContext
from pegboard.interfaces.quantizer import LinearWeight
from pegboard.testing.attention_reference import rotate_reference
from pegboard.testing.coded_weights import Form, coded_weight, forms_of
from pegboard.testing.linear_weight import dense, seen_inputs

if TYPE_CHECKING:
    import torch

MakeKernel = Callable[[KernelContext], Kernel]

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1.6e-2, "float16": 2e-3}
"""Most relative error of one rounding path, by activation dtype."""

BATCHES = (1, 2, 3, 4, 5, 17, 33)


class KernelContract:
    """The contract of all kernels.

    Attributes:
        operation: one of `OPERATIONS` or `REJECTION_OPERATIONS`.
        formats: weight formats under test.
        dtypes: activation dtypes under test.
        device: `cpu` or `cuda`.
        row_invariant: the manifest promises it.
    """

    operation: ClassVar[str]
    formats: ClassVar[tuple[str, ...]] = ("float",)
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    device: ClassVar[str] = "cpu"
    row_invariant: ClassVar[bool] = False

    @pytest.fixture
    def make(self) -> MakeKernel:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    def kernel(self, make: MakeKernel, dtype: str, format: str = "float") -> Any:
        """The kernel of one activation dtype."""
        return make(KernelContext(self.operation, format, dtype, self.device, 1))

    def random(self, *shape: int, dtype: str, seed: int = 5) -> torch.Tensor:
        """Normal numbers on the device."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(self.device, getattr(torch, dtype))

    def close(
        self,
        got: torch.Tensor,
        expected: torch.Tensor,
        dtype: str,
        scale: float = 1,
        rounding: str | None = None,
    ) -> None:
        """Compares with a float64 reference, relative to its size; `rounding`: the dtype of the
        computation, where it is another than the result's."""
        import torch

        assert got.dtype == getattr(torch, dtype) and got.shape == expected.shape
        size = expected.abs().max().item()
        error = (got.double() - expected).abs().max().item()
        assert error <= scale * TOLERANCE[rounding or dtype] * max(size, 1.0), (
            f"{dtype}: off by {error}"
        )

    def test_self_test_passes(self, make: MakeKernel) -> None:
        for dtype in self.dtypes:
            for format in self.formats:
                self.kernel(make, dtype, format).self_test()


class LinearContract(KernelContract):
    """Operation `linear`: each format, in each form that a weight of it may have (`coded_weights`).

    The expected product takes the inputs as the format rounds them.
    """

    operation = "linear"
    shapes: ClassVar[tuple[tuple[int, int], ...]] = ((517, 40), (72, 96), (3, 24))

    def weights(self, shape: tuple[int, int], dtype: str) -> Iterator[LinearWeight]:
        """Weights of all formats and forms."""
        for format in self.formats:
            for form in forms_of(format):
                yield self.weight(format, shape, dtype, form)

    def weight(
        self, format: str, shape: tuple[int, int], dtype: str, form: Form | None = None
    ) -> LinearWeight:
        """A weight of the format; floats, or codes of a form."""
        if format == "float":
            return LinearWeight(format, shape, values=self.random(*shape, dtype=dtype))
        return coded_weight(format, shape, form or Form(), self.device)

    def test_linear_is_the_product(self, make: MakeKernel) -> None:
        for dtype in self.dtypes:
            for shape in self.shapes:
                x = self.random(max(BATCHES), shape[1], dtype=dtype)
                for weight in self.weights(shape, dtype):
                    kernel = self.kernel(make, dtype, weight.format)
                    packed = kernel.prepare(weight)
                    expected = seen_inputs(x, weight) @ dense(weight).T
                    for batch in BATCHES:
                        got = kernel.linear(x[:batch], packed)
                        self.close_product(got, expected[:batch], weight, dtype)

    def test_whole_numbers_are_summed_exactly(self, make: MakeKernel) -> None:
        """Codes and inputs at the ends of their range, and sums below 2**24."""
        for dtype in set(self.dtypes) & {"float32", "float64"}:
            for format in self.formats:
                kernel = self.kernel(make, dtype, format)
                weight, x = self.whole_numbers(format, (67, 1000), dtype)
                got = kernel.linear(x, kernel.prepare(weight))
                assert bool((got.double() == x.double() @ dense(weight).T).all())

    def whole_numbers(
        self, format: str, shape: tuple[int, int], dtype: str
    ) -> tuple[LinearWeight, torch.Tensor]:
        """A weight, and inputs [5, in_features] whose scales are 1, so that rounding keeps them."""
        import torch

        kind, _, activations = format.partition(":")
        ends = {"int8": (-128, 127), "uint4": (0, 15)}.get(kind, (-8, 8))
        input_ends = (-128, 127) if activations == "static" else (-127, 127)
        if kind == "float8":
            input_ends = (-8, 8)
        codes, x = self.either(ends, shape), self.either(input_ends, (5, shape[1]))
        x[:, ::32] = 448 if kind == "float8" else 127
        weight = self.weight(format, shape, dtype)
        if weight.codes is None or weight.scales is None:
            weight = replace(weight, values=codes.to(self.device, getattr(torch, dtype)))
        else:
            weight = replace(
                weight,
                codes=codes.to(self.device, weight.codes.dtype),
                scales=torch.ones_like(weight.scales),
                input_scale=None
                if weight.input_scale is None
                else torch.ones_like(weight.input_scale),
            )
        return weight, x.to(self.device, getattr(torch, dtype))

    def either(self, ends: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
        """One of two numbers at random; rows of only the first and only the second."""
        import torch

        pick = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(7))
        pick[0], pick[1] = 0, 1
        return torch.tensor(ends)[pick]

    def test_inputs_of_zero_give_no_nan(self, make: MakeKernel) -> None:
        for dtype in self.dtypes:
            for weight in self.weights((72, 96), dtype):
                kernel = self.kernel(make, dtype, weight.format)
                x = self.random(3, 96, dtype=dtype)
                x[1] = 0
                x[2, :32] = 0
                expected = seen_inputs(x, weight) @ dense(weight).T
                got = kernel.linear(x, kernel.prepare(weight))
                self.close_product(got, expected, weight, dtype)

    def close_product(
        self, got: torch.Tensor, expected: torch.Tensor, weight: LinearWeight, dtype: str
    ) -> None:
        """`close` for outputs of a linear layer. Inputs are quantized, and what follows is computed,
        in float32."""
        narrow = dtype == "float64" and weight.activations != "float"
        self.close(got, expected, dtype, scale=4, rounding="float32" if narrow else dtype)

    def test_gathered_rows_are_the_weights_rows(self, make: MakeKernel) -> None:
        import torch

        ids = torch.tensor([0, 516, 3, 3, 77], device=self.device)
        for dtype in self.dtypes:
            for weight in self.weights((517, 40), dtype):
                kernel = self.kernel(make, dtype, weight.format)
                if kernel.gathers:
                    rows = kernel.gather_rows(kernel.prepare(weight), ids)
                    self.close(rows, dense(weight)[ids], dtype)

    def test_input_is_not_changed(self, make: MakeKernel) -> None:
        dtype = self.dtypes[0]
        for weight in self.weights((72, 96), dtype):
            kernel = self.kernel(make, dtype, weight.format)
            x = self.random(5, 96, dtype=dtype)
            before = x.clone()
            kernel.linear(x, kernel.prepare(weight))
            assert bool((x == before).all())

    def test_row_invariant_kernels_give_each_row_the_same_bits(self, make: MakeKernel) -> None:
        import torch

        if not self.row_invariant:
            pytest.skip("the kernel does not promise row_invariant")
        for dtype in self.dtypes:
            x = self.random(33, 40, dtype=dtype)
            for weight in self.weights((517, 40), dtype):
                kernel = self.kernel(make, dtype, weight.format)
                packed = kernel.prepare(weight)
                whole = kernel.linear(x, packed)
                for batch in BATCHES:
                    starts = range(0, 33, batch)
                    pieces = [kernel.linear(x[start : start + batch], packed) for start in starts]
                    assert torch.equal(torch.cat(pieces), whole)


class RMSNormContract(KernelContract):
    """Operation `rms_norm`."""

    operation = "rms_norm"

    def reference(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.double()
        root = (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return wide / root * weight.double()

    @pytest.mark.parametrize("shape", [(1, 40), (7, 576), (3, 5, 24)])
    def test_rms_norm_is_the_formula(self, make: MakeKernel, shape: tuple[int, ...]) -> None:
        for dtype in self.dtypes:
            kernel = self.kernel(make, dtype)
            x, weight = (
                self.random(*shape, dtype=dtype),
                self.random(shape[-1], dtype=dtype, seed=6),
            )
            got = kernel.rms_norm(x.clone(), weight, 1e-5)
            self.close(got, self.reference(x, weight, 1e-5), dtype, scale=2)

    def test_epsilon_counts(self, make: MakeKernel) -> None:
        for dtype in self.dtypes:
            x = self.random(3, 40, dtype=dtype) * 1e-3
            weight = self.random(40, dtype=dtype, seed=6)
            got = self.kernel(make, dtype).rms_norm(x.clone(), weight, 1e-2)
            self.close(got, self.reference(x, weight, 1e-2), dtype, scale=2)

    def test_sum_and_norm_in_one(self, make: MakeKernel) -> None:
        for dtype in self.dtypes:
            x, residual = (self.random(7, 40, dtype=dtype, seed=seed) for seed in (1, 2))
            weight = self.random(40, dtype=dtype, seed=3)
            total = (x.double() + residual.double()).to(x.dtype)
            kernel = self.kernel(make, dtype)
            normed, summed = kernel.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
            self.close(summed, total.double(), dtype)
            self.close(normed, self.reference(total, weight, 1e-5), dtype, scale=2)


class RotaryContract(KernelContract):
    """Operation `rotary`."""

    operation = "rotary"

    @pytest.mark.parametrize(("head_dim", "rotated"), [(24, 24), (64, 64), (64, 32)])
    def test_rotation_is_a_complex_product(
        self, make: MakeKernel, head_dim: int, rotated: int
    ) -> None:
        import torch

        for dtype in self.dtypes:
            wide = torch.float64 if dtype == "float64" else torch.float32
            inverse = 10000.0 ** -(torch.arange(rotated // 2, dtype=torch.float64) * 2 / rotated)
            angles = torch.arange(512, dtype=torch.float64)[:, None] * inverse
            cos, sin = angles.cos().to(self.device, wide), angles.sin().to(self.device, wide)
            x = self.random(9, 5, head_dim, dtype=dtype)
            positions = torch.tensor([0, 1, 2, 3, 100, 100, 511, 7, 0], device=self.device)
            got = self.kernel(make, dtype).rotate(x.clone(), positions, cos, sin)
            self.close(got, rotate_reference(x, positions, cos, sin), dtype, scale=2)


class SiluMulContract(KernelContract):
    """Operation `silu_mul`."""

    operation = "silu_mul"

    @pytest.mark.parametrize("shape", [(1, 72), (5, 1536), (33, 7)])
    def test_silu_mul_is_the_formula(self, make: MakeKernel, shape: tuple[int, int]) -> None:
        for dtype in self.dtypes:
            gate, up = (self.random(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
            wide = gate.double()
            expected = wide / (1.0 + (-wide).exp()) * up.double()
            got = self.kernel(make, dtype).silu_mul(gate.clone(), up.clone())
            self.close(got, expected, dtype, scale=4)

    def test_large_numbers_stay_finite(self, make: MakeKernel) -> None:
        import torch

        for dtype in self.dtypes:
            gate = torch.tensor([[-1e4, 1e4, -100.0, 0.0]], dtype=getattr(torch, dtype))
            up = torch.ones_like(gate)
            got = self.kernel(make, dtype).silu_mul(gate.to(self.device), up.to(self.device))
            expected = torch.tensor([[0.0, 1e4, 0.0, 0.0]], dtype=torch.float64)
            self.close(got.cpu(), expected, dtype)
