"""Layers as GPTQ's tools store them: which tensors, of which shapes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredParameter, WeightSpec
from pegboard_gptq.config import GPTQSettings, settings_of
from pegboard_quant.planning import WORD_BITS, GroupedLayer, group_count, num_words

CODES = "qweight"


@dataclass(frozen=True, slots=True)
class GPTQLayer(GroupedLayer):
    """A layer in codes.

    Attributes:
        settings: what the config says of it.
    """

    settings: GPTQSettings


def gptq_layer(layer: WeightSpec, facts: CheckpointFacts) -> GPTQLayer | None:
    """The form in which a layer is stored; None: not in codes.

    Raises:
        CheckpointError: config and tensors contradict each other.
    """
    if f"{layer.name}.{CODES}" not in facts.tensors:
        return None
    settings = settings_of(layer.name, facts)
    if settings is None:
        raise CheckpointError(
            f"tensor {layer.name}.{CODES}",
            "is there, though the config's `dynamic` leaves the layer unquantized",
            fix="get config and weights from one checkpoint",
        )
    num_groups = group_count(layer, settings.group_size, where="quantization_config.group_size")
    size = layer.shape[1] if settings.group_size == -1 else settings.group_size
    has_map = f"{layer.name}.g_idx" in facts.tensors
    parameters = _parameters(layer, settings.bits, num_groups, cut_groups=not has_map)
    if has_map:
        parameters += (
            StoredParameter("g_idx", (layer.shape[1],), "int32", {"out": None, "in": 0}),
        )
    elif settings.reordered and num_groups > 1:
        raise CheckpointError(
            f"tensor {layer.name}.g_idx",
            "is missing, and desc_act says that groups are not consecutive",
            fix="get the checkpoint again, or quantize it with desc_act: false",
        )
    return GPTQLayer(settings.bits, layer.shape, num_groups, size, parameters, settings)


def _parameters(
    layer: WeightSpec, bits: int, num_groups: int, *, cut_groups: bool
) -> tuple[StoredParameter, ...]:
    """All but the map. With a map any input may be in any group, so that a part of the inputs needs
    all groups."""
    out_features, in_features = layer.shape
    each = WORD_BITS // bits
    rows = 0 if cut_groups and num_groups > 1 else None
    return (
        StoredParameter(
            CODES, (num_words(in_features, bits), out_features), "int32", {"out": 1, "in": 0}, each
        ),
        StoredParameter(
            "qzeros",
            (num_groups, num_words(out_features, bits)),
            "int32",
            {"out": 1, "in": rows},
            each,
            "out",
        ),
        StoredParameter("scales", (num_groups, out_features), None, {"out": 1, "in": rows}),
    )
