"""How each row's tokens are sampled."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.interfaces.kernel import SampleRows
from pegboard.step import Float32, Int32, Int64, RowAdmission


class SamplingTable:
    """The sampling parameters of rows, as `SampleRows` wants them.

    Attributes:
        temperature: float32 [max_num_seqs].
    """

    def __init__(self, max_num_seqs: int, device: str) -> None:
        self._device = device
        self.temperature: Float32 = np.zeros(max_num_seqs, np.float32)
        self._top_p, self._min_p = np.ones_like(self.temperature), np.zeros_like(self.temperature)
        self._top_k: Int64 = np.zeros(max_num_seqs, np.int64)
        self._index = np.zeros_like(self._top_k)
        self._seed: NDArray[np.uint64] = np.zeros(max_num_seqs, np.uint64)

    def admit(self, admission: RowAdmission) -> None:
        """Notes the parameters of a row."""
        row = admission.row
        self.temperature[row], self._top_k[row] = admission.temperature, admission.top_k
        self._top_p[row], self._min_p[row] = admission.top_p, admission.min_p
        self._seed[row], self._index[row] = admission.seed, admission.index

    def parameters(self, rows: Int32, positions: Int64, temperature: Float32) -> SampleRows:
        """The parameters of rows.

        Args:
            rows: int32 [R].
            positions: int64 [R], of the tokens that are sampled.
            temperature: float32 [R], in place of the table's.
        """

        def tensor(values: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(values).to(self._device)

        return SampleRows(
            temperature=tensor(temperature),
            top_k=tensor(self._top_k[rows]),
            top_p=tensor(self._top_p[rows]),
            min_p=tensor(self._min_p[rows]),
            seed=tensor(self._seed[rows].view(np.int64)),
            position=tensor(positions),
            index=tensor(self._index[rows]),
        )
