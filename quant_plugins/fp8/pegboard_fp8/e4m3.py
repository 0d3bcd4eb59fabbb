"""Numbers to e4m3 (arXiv 2209.05433): 4 bits of exponent, 3 of mantissa, no infinity, at most 448."""

from __future__ import annotations

import torch

MAX = 448.0
"""The largest number; what is larger is clamped to it, whatever torch's own cast does there."""

CODES = torch.float8_e4m3fn


def to_e4m3(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest codes of float32 numbers, ties to even; a NaN stays one. Of the numbers' shape."""
    return numbers.float().clamp(-MAX, MAX).to(CODES)
