"""Encoded keys and values as they are read back, by tables of all that a code can stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

NEAR = 1e-6
"""The most that the rounding of a rotation may move a number, as a share of the head's largest."""


def _int8() -> list[float]:
    return [float(code) for code in range(128)]


def _e4m3() -> list[float]:
    """The numbers of e4m3 by exponent and mantissa, without the last code, which is no number."""
    small = [mantissa * 2.0**-9 for mantissa in range(8)]
    exponents, eighths = range(1, 16), range(8)
    return small + [2.0 ** (e - 7) * (1 + m / 8) for e in exponents for m in eighths][:-1]


SIZES: dict[str, NDArray[np.float64]] = {
    "int8": np.array(_int8()),
    "fp8_e4m3": np.array(_e4m3()),
}
"""The sizes of numbers of each encoding, ascending: a size's code is its place."""


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Keys or values of a layer, as an encoding gives them back.

    Attributes:
        encoding: `none`, `int8` or `fp8_e4m3`.
        fixed: static scales, one a KV head; None: dynamic ones.
    """

    encoding: str
    fixed: Sequence[float] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., num_kv_heads, head_dim] -> the same, in float64."""
        import torch

        if self.encoding == "none":
            return x.double()
        numbers = x.float().numpy()
        scale = self._scale(numbers)
        nearest = _nearest(SIZES[self.encoding], _divided(numbers, scale)).astype(np.float32)
        return torch.from_numpy(nearest * scale).double()

    def is_decided(self, x: torch.Tensor) -> bool:
        """Whether numbers that are off by `NEAR` of the largest have the same codes: no number lies
        about half way between two."""
        if self.encoding == "none":
            return True
        numbers = x.float().numpy()
        scale, sizes = self._scale(numbers), SIZES[self.encoding]
        margin = (NEAR * np.abs(numbers).max(axis=-1, keepdims=True)).astype(np.float32)
        above, below = (
            _nearest(sizes, _divided(moved, scale))
            for moved in (numbers + margin, numbers - margin)
        )
        return bool((above == below).all())

    def _scale(self, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        """[..., num_kv_heads, 1]."""
        if self.fixed is not None:
            return np.array(self.fixed, dtype=np.float32)[:, None]
        largest = np.abs(numbers).max(axis=-1, keepdims=True)
        scale: NDArray[np.float32] = largest / np.float32(SIZES[self.encoding][-1])
        return scale


def _divided(numbers: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.divide(numbers, scale, out=np.zeros_like(numbers), where=scale > 0)


def _nearest(sizes: NDArray[np.float64], numbers: NDArray[np.float32]) -> NDArray[np.float64]:
    """The nearest of +-sizes; of two equally near, the one of an even place."""
    wanted = np.minimum(np.abs(numbers).astype(np.float64), sizes[-1])
    above = np.searchsorted(sizes, wanted).clip(1, len(sizes) - 1)
    below = above - 1
    to_above, to_below = sizes[above] - wanted, wanted - sizes[below]
    is_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    nearest: NDArray[np.float64] = np.where(is_above, sizes[above], sizes[below])
    return np.copysign(nearest, numbers)
