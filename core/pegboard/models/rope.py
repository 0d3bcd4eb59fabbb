"""Angles of the rotary embedding (arXiv 2104.09864) and its scalings to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from pegboard.interfaces.attention import RotaryTable
from pegboard.interfaces.model import RopeShape


def rotary_table(
    rope: RopeShape, num_positions: int, dtype: torch.dtype, device: torch.device
) -> RotaryTable:
    """cos and sin of every position's angles, [num_positions, rotary_dim / 2].

    Frequencies are float32 in every model, as in training; angles are float64 for a float64 model
    and float32 for all others.
    """
    angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    # computed on the CPU, so that a model has the same angles on every device
    frequencies, amplitude = rotary_frequencies(rope)
    positions = torch.arange(num_positions, dtype=angle_dtype)
    angles = torch.outer(positions, frequencies.to(angle_dtype))
    return RotaryTable(
        cos=(angles.cos() * amplitude).to(device), sin=(angles.sin() * amplitude).to(device)
    )


def rotary_frequencies(rope: RopeShape) -> tuple[torch.Tensor, float]:
    """Radians a position, float32 [rotary_dim / 2], and the factor of cos and sin."""
    periods = _periods(rope)
    if rope.scaling is None:
        return 1.0 / periods, 1.0
    if rope.scaling["rope_type"] == "linear":
        return 1.0 / periods / rope.scaling["factor"], 1.0
    if rope.scaling["rope_type"] == "llama3":
        return _llama3(1.0 / periods, rope.scaling), 1.0
    return _yarn(rope, rope.scaling), rope.scaling["attention_factor"]


def _periods(rope: RopeShape) -> torch.Tensor:
    """Positions a radian, theta^(2i / rotary_dim)."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return torch.as_tensor(rope.theta**exponents)


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by the factor, short ones kept, those between blended."""
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = scaling["original_max_position_embeddings"]
    waves = 2 * math.pi / frequencies
    blend = (context / waves - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(waves > context / low, frequencies / factor, blended)
    return torch.where(waves < context / high, frequencies, scaled)


def _yarn(rope: RopeShape, scaling: Mapping[str, Any]) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): a ramp over the dimensions from kept to interpolated frequencies."""
    dim, context = rope.rotary_dim, scaling["original_max_position_embeddings"]

    def dimension_of(num_rotations: float) -> float:
        """The dimension whose wave turns so many times within the original context."""
        return (dim * math.log(context / (num_rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension_of(scaling["beta_fast"]), dimension_of(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp's width divides
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    periods = _periods(rope)
    interpolated = 1.0 / (float(scaling["factor"]) * periods)
    return interpolated * (1 - kept) + (1.0 / periods) * kept
