"""When requests are to be sent."""

from __future__ import annotations

import numpy as np


def arrival_times(
    count: int, rate: float, burstiness: float, rng: np.random.Generator
) -> list[float]:
    """Seconds from the start at which each request is scheduled, the first at 0.

    The gaps are of a gamma distribution of shape `burstiness` and mean 1 / `rate`: 1 makes a Poisson
    process, less is burstier, infinity is a steady beat. They are scaled so that the drawn gaps have
    exactly that mean, and runs of the same rate offer the same load.

    Args:
        rate: requests a second; infinity: all at once.
        burstiness: over 0.
    """
    if count < 2 or np.isinf(rate):
        return [0.0] * count
    if np.isinf(burstiness):
        gaps = np.ones(count - 1)
    else:
        gaps = rng.gamma(burstiness, 1 / burstiness, size=count - 1)
    # Very bursty draws can all be 0 in float64.
    total = gaps.sum() or 1.0
    times = np.concatenate(([0.0], np.cumsum(gaps))) * ((count - 1) / rate / total)
    return [float(time) for time in times]
