"""Formats, parameters and sizes of weights in integer codes, for planning. Torch-free."""

from __future__ import annotations

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredKVScales, StoredParameter, WeightSpec
from pegboard_gptq import gptq_plan
from pegboard_gptq.config import settings_of
from pegboard_gptq.gptq_plan import GPTQLayer, gptq_layer
from pegboard_quant import packed_layers
from pegboard_quant.compressed_tensors import METHODS, parse
from pegboard_quant.kv_scales import compressed_kv_scales
from pegboard_quant.options import ActivationOptions
from pegboard_quant.packed_layers import PackedLayer, packed_layer, packed_sizes
from pegboard_quant.planning import (
    bytes_of,
    check_activation_groups,
    code_format,
    is_plain,
    missing_weight,
    modules_with,
    parameters_of,
)


def stored_layer(layer: WeightSpec, facts: CheckpointFacts) -> GPTQLayer | PackedLayer | None:
    """The form of a layer in codes; None: its weight is in floats. The tensors decide, and the
    config must not contradict them.

    Raises:
        CheckpointError: it does, or there is neither.
    """
    is_packed = facts.quantization in METHODS
    found = packed_layer(layer, facts) if is_packed else gptq_layer(layer, facts)
    if found is None and not is_plain(layer, facts):
        codes = packed_layers.CODES if is_packed else gptq_plan.CODES
        raise missing_weight(layer, facts, f"{layer.name}.{codes}")
    return found


def parameters(layer: WeightSpec, facts: CheckpointFacts) -> tuple[StoredParameter, ...]:
    """The tensors of a layer.

    Raises:
        CheckpointError: config and tensors contradict each other, or there are none.
    """
    return parameters_of(layer, stored_layer(layer, facts))


def resident_bytes(
    layer: WeightSpec, facts: CheckpointFacts, dtype: str, options: ActivationOptions | None
) -> int:
    """Bytes in memory: codes of 4 or 8 bits, scales and zeros; or the weight in floats."""
    return bytes_of(layer, stored_layer(layer, facts), dtype)


def formats(facts: CheckpointFacts, options: ActivationOptions) -> tuple[str, ...]:
    """Formats of the checkpoint's weights.

    Raises:
        CheckpointError: the config says what is not known.
        ConfigError: its groups do not go together with quantized activations.
    """
    is_packed = facts.quantization in METHODS
    stored = packed_sizes(parse(facts).groups) if is_packed else _gptq_sizes(facts)
    for group_size in sorted({size for _, size in stored}):
        check_activation_groups(group_size, options.activations)
    return ("float", *sorted({code_format(bits, options.activations) for bits, _ in stored}))


def kv_scales(facts: CheckpointFacts) -> tuple[StoredKVScales, ...]:
    """Static scales of keys and values, which compressed-tensors checkpoints may have.

    Raises:
        CheckpointError: the config promises them, and they are not there or not known.
    """
    return compressed_kv_scales(facts) if facts.quantization in METHODS else ()


def _gptq_sizes(facts: CheckpointFacts) -> set[tuple[int, int]]:
    """Bits and group sizes of the layers in codes."""
    found = (settings_of(module, facts) for module in modules_with(gptq_plan.CODES, facts))
    return {(settings.bits, settings.group_size) for settings in found if settings is not None}
