"""Whether products of bfloat16 are faster than those of float32, which depends on the processor."""

from __future__ import annotations

import time

import torch

from pegboard.errors import ConfigError

PRECISIONS = ("auto", "float32", "bfloat16")
SIZE, TRIALS = 512, 3


def in_bfloat16(precision: str) -> bool:
    """Whether to train with products of bfloat16. `auto`: where they are faster.

    Raises:
        ConfigError: no such precision.
    """
    if precision not in PRECISIONS:
        raise ConfigError("precision", repr(precision), allowed=", ".join(PRECISIONS))
    if precision != "auto":
        return precision == "bfloat16"
    return _seconds(torch.bfloat16) < 0.8 * _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """Processor time of a product, the best of a few."""
    x = torch.ones(SIZE, SIZE, dtype=dtype)
    x @ x
    trials = []
    for _ in range(TRIALS):
        begin = time.process_time()
        x @ x
        trials.append(time.process_time() - begin)
    return min(trials)
