"""Formats, parameters and sizes of AWQ checkpoints, for planning. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredParameter, WeightSpec
from pegboard_quant.auto_round import METHOD as AUTO_ROUND
from pegboard_quant.auto_round import plain_settings
from pegboard_quant.keys import check_keys
from pegboard_quant.names import contains_any
from pegboard_quant.options import ActivationOptions
from pegboard_quant.planning import (
    WORD_BITS,
    GroupedLayer,
    bytes_of,
    check_activation_groups,
    code_format,
    flag,
    group_count,
    is_plain,
    missing_weight,
    modules_with,
    parameters_of,
    texts,
    whole,
)

BITS = 4
EACH = WORD_BITS // BITS
VERSION = "gemm"
CODES = "qweight"

_METHOD = "awq"
_HEEDED = frozenset(
    {
        *("bits", "w_bit", "group_size", "q_group_size", "zero_point", "pack_dtype"),
        *("version", "format", "checkpoint_format", "modules_to_not_convert"),
        *("desc_act", "sym"),  # of other methods: inputs are in order, and zeros are stored
    }
)


@dataclass(frozen=True, slots=True)
class AWQSettings:
    """The config's settings of all layers.

    Attributes:
        group_size: inputs that share a scale; -1: all.
        has_zeros: zeros differ from group to group; else all are the middle code.
        kept: names of modules that stay in floats.
    """

    group_size: int
    has_zeros: bool
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AWQLayer(GroupedLayer):
    """A layer in codes.

    Attributes:
        settings: what the config says.
    """

    settings: AWQSettings


def settings_of(facts: CheckpointFacts) -> AWQSettings:
    """The config.

    Raises:
        CheckpointError: something that is not known or not read.
    """
    config = facts.quantization_config
    if facts.quantization == AUTO_ROUND:
        config, kept = plain_settings(config)
        config["modules_to_not_convert"] = [*texts(config, "modules_to_not_convert"), *kept]
    check_keys(config, _HEEDED, _METHOD)
    said = {key: value for key, value in config.items() if value is not None}
    for key in ("version", "format", "checkpoint_format"):
        version = str(said.get(key, VERSION)).lower()
        if version != VERSION:
            raise CheckpointError(
                f"quantization_config.{key}",
                version,
                allowed=VERSION,
                fix="convert the checkpoint to gemm with the tool that wrote it",
            )
    if said.get("pack_dtype", "int32") != "int32":
        raise CheckpointError(
            "quantization_config.pack_dtype", f"{said['pack_dtype']!r}", allowed="int32"
        )
    bits = whole(said, "bits" if "bits" in said else "w_bit", BITS)
    if bits != BITS:
        raise CheckpointError("quantization_config.bits", f"{bits}", allowed=f"{BITS}")
    group_size = whole(said, "group_size" if "group_size" in said else "q_group_size")
    if group_size != -1 and group_size < 1:
        raise CheckpointError(
            "quantization_config.group_size", f"{group_size}", allowed="-1 or a positive number"
        )
    return AWQSettings(
        group_size=group_size,
        has_zeros=flag(said, "zero_point", default=True),
        kept=texts(config, "modules_to_not_convert"),
    )


def awq_layer(layer: WeightSpec, facts: CheckpointFacts) -> AWQLayer | None:
    """The form in which a layer is stored; None: its weight is in floats. The tensors decide, and the
    config must not contradict them.

    Raises:
        CheckpointError: it does, there is neither, or the layer cannot be in codes.
    """
    codes = f"{layer.name}.{CODES}"
    if codes not in facts.tensors:
        if is_plain(layer, facts):
            return None
        raise missing_weight(layer, facts, codes)
    settings = settings_of(facts)
    if contains_any(settings.kept, layer.name):
        raise CheckpointError(
            f"tensor {codes}",
            "is there, though modules_to_not_convert names the layer",
            fix="get config and weights from one checkpoint",
        )
    out_features, in_features = layer.shape
    if out_features % EACH != 0:
        raise CheckpointError(
            f"tensor {codes}", f"has {out_features} outputs", allowed=f"a multiple of {EACH}"
        )
    num_groups = group_count(layer, settings.group_size, where="quantization_config.group_size")
    size = in_features if settings.group_size == -1 else settings.group_size
    cut = {"out": 1, "in": 0}
    groups_cut = {"out": 1, "in": 0 if num_groups > 1 else None}
    width = out_features // EACH
    stored = (
        StoredParameter(CODES, (in_features, width), "int32", cut, EACH, "out"),
        StoredParameter("qzeros", (num_groups, width), "int32", groups_cut, EACH, "out"),
        StoredParameter("scales", (num_groups, out_features), None, groups_cut),
    )
    return AWQLayer(BITS, layer.shape, num_groups, size, stored, settings)


def parameters(layer: WeightSpec, facts: CheckpointFacts) -> tuple[StoredParameter, ...]:
    """The tensors of a layer.

    Raises:
        CheckpointError: config and tensors contradict each other, or there are none.
    """
    return parameters_of(layer, awq_layer(layer, facts))


def resident_bytes(
    layer: WeightSpec, facts: CheckpointFacts, dtype: str, options: ActivationOptions | None
) -> int:
    """Bytes in memory: codes of 4 bits, scales and zeros; or the weight in floats."""
    return bytes_of(layer, awq_layer(layer, facts), dtype)


def formats(facts: CheckpointFacts, options: ActivationOptions) -> tuple[str, ...]:
    """Formats of the checkpoint's weights.

    Raises:
        CheckpointError: the config says what is not known.
        ConfigError: its groups do not go together with quantized activations.
    """
    check_activation_groups(settings_of(facts).group_size, options.activations)
    if not modules_with(CODES, facts):
        return ("float",)
    return ("float", code_format(BITS, options.activations))
