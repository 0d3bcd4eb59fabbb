"""Static scales of keys and values, read from a checkpoint that holds them."""

from __future__ import annotations

import logging
import math

from pegboard.errors import CheckpointError
from pegboard.interfaces.attention import KVScales
from pegboard.interfaces.checkpoint import CheckpointSource
from pegboard.interfaces.quantizer import StoredKVScales
from pegboard.plugins.composition import ModelPlan
from pegboard.plugins.functions import ask

_log = logging.getLogger(__name__)


def read_kv_scales(plan: ModelPlan, source: CheckpointSource) -> dict[int, KVScales]:
    """The scales by decoder layer; empty where the checkpoint holds none.

    Raises:
        CheckpointError: one is of another shape, or not a positive finite number.
    """
    quantizer, layers = plan.parts["quantizer"], plan.shape.attention
    if quantizer.entry.kv_scales is None:
        return {}
    stored: tuple[StoredKVScales, ...] = ask(quantizer, "kv_scales", plan.facts)
    read: dict[int, KVScales] = {}
    for scales in stored:
        if scales.layer >= len(layers):
            was = f"is of layer {scales.layer}, and the model has {len(layers)}"
            raise CheckpointError(f"tensor {scales.k!r}", was)
        num_heads = layers[scales.layer].num_kv_heads
        k, v = (_numbers(source, name, num_heads) for name in (scales.k, scales.v))
        read[scales.layer] = KVScales(scales.codes, k, v)
    if read and all(set((*scales.k, *scales.v)) == {1.0} for scales in read.values()):
        _log.warning("all KV scales of the checkpoint are 1: it seems not to be calibrated")
    return read


def _numbers(source: CheckpointSource, name: str, num_heads: int) -> tuple[float, ...]:
    tensor = source.read(name)
    if not tensor.is_floating_point() or tensor.numel() not in (1, num_heads):
        was = f"is {tensor.dtype} of shape {list(tensor.shape)}"
        allowed = f"one floating number, or {num_heads}, one a KV head"
        raise CheckpointError(f"tensor {name!r}", was, allowed=allowed)
    numbers: list[float] = tensor.float().flatten().tolist()
    for number in numbers:
        if not (math.isfinite(number) and number > 0):
            allowed = "positive finite numbers"
            raise CheckpointError(f"tensor {name!r}", f"holds {number}", allowed=allowed)
    return tuple(numbers) if len(numbers) == num_heads else tuple(numbers) * num_heads
