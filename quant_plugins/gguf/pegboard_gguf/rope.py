"""Rotary embedding's settings, from GGUF's metadata to Hugging Face's `rope_parameters`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pegboard.errors import CheckpointError
from pegboard_gguf.metadata import Metadata

# Llama 3.1's rule as its models are published. GGUF holds its result alone, `rope_freqs.weight`.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


def rope_parameters(
    metadata: Metadata, head_dim: int, factors: NDArray[np.float32] | None
) -> dict[str, Any]:
    """`rope_parameters` of a config.

    Args:
        metadata: the file's.
        head_dim: elements a head.
        factors: [head_dim / 2], what each frequency is divided by (`rope_freqs.weight`); None: 1.

    Raises:
        CheckpointError: a scaling rule that has no counterpart.
    """
    theta = metadata.real(".rope.freq_base", 10000.0)
    rotary_dim = metadata.whole(".rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise metadata.fault(".rope.dimension_count", f"is {rotary_dim}", f"head size {head_dim}")
    scaling = _scaling(metadata)
    if factors is not None and not np.all(factors == 1.0):
        if scaling["rope_type"] != "default":
            raise metadata.fault(
                ".rope.scaling.type",
                f"is {scaling['rope_type']!r} beside rope_freqs.weight",
                "none",
            )
        scaling = _llama3(metadata, theta, head_dim, factors)
    return {"rope_theta": theta, **scaling}


def _scaling(metadata: Metadata) -> dict[str, Any]:
    """A file that says a factor and no rule means `linear`, as llama.cpp has it; 0 is no factor."""
    rule = metadata.text(".rope.scaling.type", "linear")
    # `scale_linear` is the older name
    factor = metadata.real(".rope.scaling.factor", metadata.real(".rope.scale_linear", 0.0)) or 1.0
    original = metadata.whole(".rope.scaling.original_context_length", 0)
    if rule == "none" or (rule == "linear" and factor == 1.0):
        return {"rope_type": "default"}
    said = {"original_max_position_embeddings": original} if original else {}
    if rule == "linear":
        return {"rope_type": "linear", "factor": factor, **said}
    if rule == "yarn":
        return _yarn(metadata, factor)
    raise metadata.fault(".rope.scaling.type", f"is {rule!r}", "none, linear, yarn")


def _yarn(metadata: Metadata, factor: float) -> dict[str, Any]:
    strength = metadata.real(".rope.scaling.yarn_ext_factor", 1.0)
    if strength not in (1.0, -1.0):  # the latter is how a file leaves it to the rule
        raise metadata.fault(".rope.scaling.yarn_ext_factor", f"is {strength}", "1.0")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.whole(".rope.scaling.original_context_length"),
    }
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if f".rope.scaling.{theirs}" in metadata:
            scaling[ours] = metadata.real(f".rope.scaling.{theirs}")
    return scaling


def _llama3(
    metadata: Metadata, theta: float, head_dim: int, factors: NDArray[np.float32]
) -> dict[str, Any]:
    # Sizes first: nothing is computed with a head size that only the metadata knows.
    positive = theta > 0 and bool(np.all((factors > 0) & np.isfinite(factors)))
    fits = positive and factors.shape == (head_dim // 2,)
    factor = float(str(np.float32(factors.max()))) if fits else 0.0
    if not fits or not _follows_llama3(factors, theta, factor):
        raise CheckpointError(
            f"{metadata.path}: rope_freqs.weight",
            "does not follow Llama 3's rule for scaled rotary embedding",
            allowed=f"low {LLAMA3_LOW}, high {LLAMA3_HIGH}, context {LLAMA3_CONTEXT}, any factor",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }


def _follows_llama3(factors: NDArray[np.float32], theta: float, factor: float) -> bool:
    steps = np.arange(len(factors), dtype=np.float64) / len(factors)
    with np.errstate(all="ignore"):  # of a theta that no model has, which follows no rule
        wavelengths = 2 * np.pi * theta**steps
        smooth = (LLAMA3_CONTEXT / wavelengths - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
        smooth = np.clip(smooth, 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    return bool(np.allclose(factors, expected, rtol=1e-4))
