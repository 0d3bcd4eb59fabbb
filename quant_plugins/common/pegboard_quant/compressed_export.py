"""Writes the config of compressed-tensors checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Args = Mapping[str, Any]
"""The quantization of one kind of tensor, in the config's words."""


def args(kind: str, strategy: str, *, dynamic: bool = False, **others: Any) -> dict[str, Any]:
    """Symmetric codes of 8 bits.

    Args:
        kind: `int` or `float`.
        strategy: what shares a scale.
        dynamic: scales are computed while running.
        others: `block_structure`, `group_size`.
    """
    return {
        "num_bits": 8,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        **others,
    }


def config_of(
    layout: str, forms: Mapping[str, tuple[Args, Args | None]], kept: Collection[str]
) -> dict[str, Any]:
    """The `quantization_config`.

    Args:
        layout: `int-quantized` or `float-quantized`.
        forms: how weights and inputs of each quantized weight are, by its name.
        kept: names of weights that stay as they are.
    """
    groups: list[tuple[tuple[Args, Args | None], list[str]]] = []
    for name, form in forms.items():
        names = next((names for other, names in groups if other == form), None)
        if names is None:
            groups.append((form, [name]))
        else:
            names.append(name)
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": ["Linear"] if len(groups) == 1 else names,
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
                "format": layout,
            }
            for index, ((weights, inputs), names) in enumerate(groups)
        },
        "ignore": sorted({"lm_head", *kept}),
        "kv_cache_scheme": None,
    }
