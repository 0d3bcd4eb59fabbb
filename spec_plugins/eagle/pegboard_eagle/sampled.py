"""Tokens drawn from the head's distribution with the noise of the target's own, so that the two often
draw alike where no token is much likelier than others."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from pegboard.interfaces.drafter import DrafterContext
from pegboard.interfaces.kernel import SampleKernel, SampleRows
from pegboard.step import Float32, Int32, Int64, RowAdmission


class Sampling:
    """How rows are sampled. Noise is by the target's ids and by the position that is guessed."""

    def __init__(self, context: DrafterContext) -> None:
        self._context = context
        most = context.max_num_seqs
        self._temperature: Float32 = np.zeros(most, np.float32)
        self._top_p: Float32 = np.ones(most, np.float32)
        self._min_p: Float32 = np.zeros(most, np.float32)
        self._top_k: Int64 = np.zeros(most, np.int64)
        self._seed: Int64 = np.zeros(most, np.int64)
        self._index: Int64 = np.zeros(most, np.int64)

    def admit(self, admission: RowAdmission) -> None:
        """A sequence took a row."""
        row = admission.row
        self._temperature[row] = admission.temperature
        self._top_p[row], self._min_p[row] = admission.top_p, admission.min_p
        self._top_k[row] = admission.top_k
        self._seed[row] = np.uint64(admission.seed).astype(np.int64)
        self._index[row] = admission.index

    def draws(self, rows: Int32) -> bool:
        """Whether any of the rows is sampled."""
        return bool(self._temperature[rows].any())

    def draw(
        self, rows: Int32, positions: Int32, logits: torch.Tensor, target_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token of the target's for each row, int64 [n], and its probability at the row's temperature;
        of a greedy row the likeliest.

        Args:
            positions: int32 [n], of these tokens.
            logits: float32 [n, draft vocabulary].
            target_ids: int64 [draft vocabulary]; None: the target's own.
        """
        if target_ids is not None:
            drafted = logits
            logits = logits.new_full((len(logits), self._context.vocab_size), -torch.inf)
            logits[:, target_ids] = drafted
        kernel = cast(SampleKernel, self._context.kernel("sample"))

        def of(table: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(table[rows]).to(logits.device)

        temperature = of(self._temperature)
        parameters = SampleRows(
            temperature=temperature,
            top_k=of(self._top_k),
            top_p=of(self._top_p),
            min_p=of(self._min_p),
            seed=of(self._seed),
            position=torch.from_numpy(positions.astype(np.int64)).to(logits.device),
            index=of(self._index),
        )
        drawn = kernel.sample(logits, parameters)
        scale = torch.where(temperature > 0, temperature, 1)[:, None]
        probabilities = torch.softmax(logits / scale, dim=1)
        return drawn, probabilities.gather(1, drawn[:, None])[:, 0]
