"""The operation `sample` natively: the formula of `SampleKernel.sample` without sorting a vocabulary.

Filters weigh the digits of an order instead of sorting, and noise, which costs two logarithms, is
evaluated only for ids that a cheap bound of it lets win.
"""

from __future__ import annotations

import torch

from pegboard.interfaces.kernel import KernelContext, SampleKernel, SampleRows
from pegboard_cpu.library import POINTER, SIZE, function, pool_of


class CPUSample(SampleKernel):
    """The tokens of the formula. Where the largest logit is infinite, the lowest such id; with a NaN,
    the first NaN in a greedy row and id 0 in another."""

    def __init__(self, context: KernelContext) -> None:
        self._pool = pool_of(context.num_threads)
        self._sample = function(
            "pb_sample", None, POINTER, SIZE, SIZE, POINTER, SIZE, *(POINTER,) * 8
        )

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        tokens = torch.empty(len(logits), dtype=torch.int64)
        dense = logits if logits.stride(1) == 1 else logits.contiguous()
        parameters = (
            rows.temperature.contiguous(),
            rows.top_k.contiguous(),
            rows.top_p.contiguous(),
            rows.min_p.contiguous(),
            rows.seed.contiguous(),
            rows.position.contiguous(),
            rows.index.contiguous(),
        )
        self._sample(
            self._pool.handle,
            *dense.shape,
            dense.data_ptr(),
            dense.stride(0),
            *[parameter.data_ptr() for parameter in parameters],
            tokens.data_ptr(),
        )
        return tokens

    def self_test(self) -> None:
        logits = torch.arange(40).mul(7).remainder(11).div(4).expand(5, 40)
        rows = SampleRows(
            temperature=torch.tensor([0.0, 1.0, 0.5, 1.0, 2.0]),
            top_k=torch.tensor([0, 0, 9, 0, 0]),
            top_p=torch.tensor([1.0, 1.0, 1.0, 0.5, 1.0]),
            min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5]),
            seed=torch.tensor([0, 5 - 2**63, 7, 11, 13]),
            position=torch.tensor([1, 3, 1, 9, 1]),
            index=torch.tensor([0, 1, 0, 0, 0]),
        )
        tokens = self.sample(logits, rows).tolist()
        # worked out with arrays of all noise
        assert tokens == [3, 32, 14, 9, 28], f"drew {tokens} for [3, 32, 14, 9, 28]"
