"""Contract suites of the operations `sample`, the one way a token is chosen, and `probabilities`.

    class TestMySampler(SampleContract):
        @pytest.fixture
        def make(self):
            return MySampler                # called with a KernelContext

Tokens are compared with `philox.py`, which follows the formula of `SampleKernel.sample` in numpy, and
their frequencies with the softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray

from pegboard.interfaces.kernel import Kernel, SampleRows
from pegboard.testing.kernels import KernelContract, MakeKernel
from pegboard.testing.philox import gumbel, kept_ids

if TYPE_CHECKING:
    import torch

NEAR = 1e-5
"""A decision nearer than this may fall either way by rounding, and is not compared."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 1
    index: int = 0


draws = st.builds(
    Draw,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 517, 2000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(1, 2**31 - 1),
    index=st.integers(0, 2**16),
)


def rows_of(batch: list[Draw], device: str) -> SampleRows:
    """The kernel's form of a batch's parameters."""
    import torch

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(draw, name) for draw in batch], dtype=dtype, device=device)

    seeds = np.array([draw.seed for draw in batch], dtype=np.uint64).view(np.int64)
    return SampleRows(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int64),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        seed=torch.from_numpy(seeds.copy()).to(device),
        position=column("position", torch.int64),
        index=column("index", torch.int64),
    )


def reference_token(logits: NDArray[np.float32], draw: Draw) -> tuple[int, float]:
    """The token that the formula gives, and how near the closest decision was."""
    if draw.temperature == 0.0:
        return int(np.argmax(logits)), math.inf
    z = logits / np.float32(draw.temperature)
    ids, margin = kept_ids(z, draw.top_k, float(np.float32(draw.top_p)), float(draw.min_p))
    noisy = z[ids] + gumbel(len(logits), draw.seed, draw.position, draw.index)[ids]
    best = int(np.lexsort((ids, -noisy.astype(np.float64)))[0])
    others = np.delete(noisy, best)
    if len(others):
        margin = min(margin, float(noisy[best]) - float(others.max()))
    return int(ids[best]), margin


class SampleContract(KernelContract):
    """The contract of the operation `sample`."""

    operation = "sample"
    vocab_size: ClassVar[int] = 517

    def logits(self, num_rows: int, seed: int = 3) -> NDArray[np.float32]:
        random = np.random.default_rng(seed)
        return (3.0 * random.standard_normal((num_rows, self.vocab_size))).astype(np.float32)

    def sample(self, kernel: Kernel, logits: NDArray[np.float32], batch: list[Draw]) -> list[int]:
        import torch

        tensor = torch.from_numpy(logits.copy()).to(self.device)
        rows = rows_of(batch, self.device)
        chosen: torch.Tensor = kernel.sample(tensor, rows)  # type: ignore[attr-defined]
        assert chosen.dtype == torch.int64 and chosen.shape == (len(batch),)
        assert np.array_equal(tensor.cpu().numpy(), logits), "logits were changed"
        return [int(token) for token in chosen.tolist()]

    @settings(deadline=None, suppress_health_check=list(HealthCheck))
    @given(batch=st.lists(draws, min_size=1, max_size=9), seed=st.integers(0, 99))
    def test_tokens_are_those_of_the_formula(
        self, make: MakeKernel, batch: list[Draw], seed: int
    ) -> None:
        logits = self.logits(len(batch), seed)
        got = self.sample(self.kernel(make, "float32"), logits, batch)
        for token, row, draw in zip(got, logits, batch, strict=True):
            expected, margin = reference_token(row, draw)
            assert token == expected or margin < NEAR, f"{draw}: {token}, not {expected}"

    def test_greedy_ties_go_to_the_lower_id(self, make: MakeKernel) -> None:
        logits = np.zeros((2, self.vocab_size), np.float32)
        logits[1, [9, 400]] = 5.0
        greedy = [Draw(temperature=0.0), Draw(temperature=0.0)]
        assert self.sample(self.kernel(make, "float32"), logits, greedy) == [0, 9]

    def test_filters_break_ties_by_token_id(self, make: MakeKernel) -> None:
        kernel = self.kernel(make, "float32")
        logits = np.zeros((1, self.vocab_size), np.float32)
        for draw, most in ((Draw(top_k=3), 3), (Draw(top_p=4.5 / self.vocab_size), 5)):
            seen = {
                self.sample(kernel, logits, [replace(draw, position=i)])[0] for i in range(1, 80)
            }
            assert seen == set(range(most))

    def test_a_token_depends_on_its_own_row_alone(self, make: MakeKernel) -> None:
        kernel = self.kernel(make, "float32")
        logits = self.logits(33)
        batch = [Draw(seed=i, position=2 * i + 1, top_k=i % 3 * 20, index=i % 2) for i in range(33)]
        together = self.sample(kernel, logits, batch)
        for size in (1, 2, 3, 5, 17):
            apart = []
            for start in range(0, 33, size):
                piece = slice(start, start + size)
                apart += self.sample(kernel, logits[piece], batch[piece])
            assert apart == together

    def test_seed_position_and_sequence_change_the_noise(self, make: MakeKernel) -> None:
        kernel = self.kernel(make, "float32")
        logits = np.zeros((1, self.vocab_size), np.float32)
        base = Draw(seed=2**40 + 7, position=3, index=1)
        others = (replace(base, seed=7), replace(base, position=4), replace(base, index=2))
        tokens = [self.sample(kernel, logits, [draw])[0] for draw in (base, *others)]
        assert len(set(tokens)) == len(tokens)

    def test_minus_infinity_is_never_chosen(self, make: MakeKernel) -> None:
        logits = np.full((3, self.vocab_size), -np.inf, np.float32)
        logits[:, 44] = -50.0
        batch = [Draw(), Draw(temperature=0.0), Draw(top_k=5, top_p=0.9, min_p=0.1)]
        assert self.sample(self.kernel(make, "float32"), logits, batch) == [44, 44, 44]

    @pytest.mark.parametrize("temperature", [0.5, 1.0])
    def test_frequencies_are_the_softmax(self, make: MakeKernel, temperature: float) -> None:
        kernel = self.kernel(make, "float32")
        count, vocab = 4000, 8
        logits = np.tile(self.logits(1)[:, :vocab] / 3.0, (count, 1))
        batch = [Draw(temperature=temperature, seed=5, position=i + 1) for i in range(count)]
        tokens = self.sample(kernel, logits, batch)
        seen = np.bincount(tokens, minlength=vocab)
        weights = np.exp(logits[0].astype(np.float64) / temperature)
        expected = count * weights / weights.sum()
        chi_squared = float(((seen - expected) ** 2 / expected).sum())
        # The 1e-4 quantile of chi squared with seven degrees of freedom.
        assert chi_squared < 29.9


class ProbabilitiesContract(KernelContract):
    """The contract of the operation `probabilities`."""

    operation = "probabilities"
    vocab_size: ClassVar[int] = 517

    def probabilities(
        self, kernel: Kernel, logits: NDArray[np.float32], batch: list[Draw]
    ) -> NDArray[np.float64]:
        import torch

        tensor = torch.from_numpy(logits.copy()).to(self.device)
        found: torch.Tensor = kernel.probabilities(  # type: ignore[attr-defined]
            tensor, rows_of(batch, self.device)
        )
        assert found.dtype == torch.float64 and found.shape == logits.shape
        assert np.array_equal(tensor.cpu().numpy(), logits), "logits were changed"
        array: NDArray[np.float64] = found.cpu().numpy()
        return array

    @settings(deadline=None, suppress_health_check=list(HealthCheck))
    @given(batch=st.lists(draws, min_size=1, max_size=9), seed=st.integers(0, 99))
    def test_they_are_the_softmax_of_what_the_filters_keep(
        self, make: MakeKernel, batch: list[Draw], seed: int
    ) -> None:
        random = np.random.default_rng(seed)
        shape = (len(batch), self.vocab_size)
        logits = (3.0 * random.standard_normal(shape)).astype(np.float32)
        found = self.probabilities(self.kernel(make, "float32"), logits, batch)
        for row, line, draw in zip(found, logits, batch, strict=True):
            expected = np.zeros(self.vocab_size)
            if draw.temperature == 0.0:
                expected[line.argmax()] = 1.0
            else:
                z = line / np.float32(draw.temperature)
                ids, margin = kept_ids(z, draw.top_k, float(np.float32(draw.top_p)), draw.min_p)
                if margin < NEAR:
                    continue
                weights = np.exp(z[ids].astype(np.float64) - float(z.max()))
                expected[ids] = weights / weights.sum()
            assert np.allclose(row, expected, rtol=1e-9, atol=1e-300)

    def test_nothing_else_is_likely_beside_what_must_be(self, make: MakeKernel) -> None:
        logits = np.full((3, self.vocab_size), -np.inf, np.float32)
        logits[0, 44] = -50.0
        logits[1, [44, 99]] = np.inf
        logits[2, [44, 99]] = 2.0
        batch = [Draw(), Draw(), Draw(temperature=0.0)]
        expected = np.zeros((3, self.vocab_size))
        expected[:, 44] = 1.0
        found = self.probabilities(self.kernel(make, "float32"), logits, batch)
        assert np.array_equal(found, expected)
