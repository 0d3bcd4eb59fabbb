"""Reads the rotary embedding's part of a model's config. Torch-free.

Both spellings are read: `rope_parameters` with `rope_theta` inside, and the older `rope_theta`
beside `rope_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pegboard.interfaces.model import RopeShape
from pegboard.models.config_values import ConfigValues

DEFAULT_THETA = 10000.0


def rope_shape(config: ConfigValues, rotary_dim: int, max_position: int) -> RopeShape:
    """The rotary embedding that a config asks for.

    `RopeShape.scaling` comes with every number that its rule needs, defaults filled in.

    Args:
        config: the model's config.
        rotary_dim: elements of a head that are rotated.
        max_position: the config's `max_position_embeddings`.

    Raises:
        CheckpointError: a rule that is not supported, or a number that is missing or wrong.
    """
    keys = [key for key in ("rope_scaling", "rope_parameters") if key in config]
    said = [_said_by(config, key, rotary_dim, max_position) for key in keys or ["rope_parameters"]]
    if any(shape != said[0] for shape in said):
        raise config.error(
            "rope_scaling", "says another rotation than rope_parameters", fix="keep one of the two"
        )
    return said[0]


def _said_by(config: ConfigValues, key: str, rotary_dim: int, max_position: int) -> RopeShape:
    """The rotation by one of the two sections, which may be empty."""
    section = config.section(key)
    outer = config.number("rope_theta", DEFAULT_THETA)
    theta = section.number("rope_theta", outer)
    if "rope_theta" in config and theta != outer:
        raise config.error("rope_theta", f"{outer:g}, and {key}.rope_theta is {theta:g}")
    for values in (section, config):
        if values.number("partial_rotary_factor", 1.0) != 1.0:
            raise values.error("partial_rotary_factor", "a partial rotation", allowed="1.0")
    rule = section.text("rope_type", section.text("type", "default"))
    if "type" in section and section.text("type") != rule:
        raise section.error("type", f"{section.text('type')!r}, and rope_type is {rule!r}")
    original = config.size(
        "original_max_position_embeddings",
        section.size("original_max_position_embeddings", max_position),
    )
    if rule == "default":
        return RopeShape(theta, rotary_dim)
    if rule not in _RULES:
        allowed = ", ".join(["default", *_RULES])
        raise section.error("rope_type", f"{rule!r} is not supported", allowed=allowed)
    scaling = {"rope_type": rule, "original_max_position_embeddings": original}
    return RopeShape(theta, rotary_dim, scaling | _RULES[rule](section, max_position / original))


def scaled_max_position(rope: RopeShape, max_position: int) -> int:
    """The longest context, in tokens, after scaling.

    Linear scaling and YaRN are commonly switched on in a config whose `max_position_embeddings` stays
    that of training; Llama 3's rule is part of training, and the number is of what came out.
    """
    if rope.scaling is None or rope.scaling["rope_type"] not in ("linear", "yarn"):
        return max_position
    original: int = rope.scaling["original_max_position_embeddings"]
    return max(max_position, int(original * rope.scaling["factor"]))


def _linear(section: ConfigValues, growth: float) -> dict[str, Any]:
    return {"factor": section.number("factor")}


def _llama3(section: ConfigValues, growth: float) -> dict[str, Any]:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if low >= high:
        raise section.error(
            "high_freq_factor", f"{high:g}", allowed=f"over low_freq_factor {low:g}"
        )
    return {
        "factor": section.number("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def _yarn(section: ConfigValues, growth: float) -> dict[str, Any]:
    factor = section.number("factor", growth)
    return {
        "factor": factor,
        "attention_factor": section.number("attention_factor", _yarn_attention(section, factor)),
        "beta_fast": section.number("beta_fast", 32.0),
        "beta_slow": section.number("beta_slow", 1.0),
        "truncate": section.flag("truncate", default=True),
    }


def _yarn_attention(section: ConfigValues, factor: float) -> float:
    """Factor of cos and sin, so that attention keeps its temperature (arXiv 2309.00071, 3.4)."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if "mscale" in section and "mscale_all_dim" in section:
        return mscale(section.number("mscale")) / mscale(section.number("mscale_all_dim"))
    return mscale(1.0)


_RULES: dict[str, Callable[[ConfigValues, float], dict[str, Any]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
