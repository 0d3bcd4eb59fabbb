"""Static scales of keys and values, wherever checkpoints keep them. Torch-free.

Tools have put them under the attention itself (`self_attn.k_scale`), under its projections
(`self_attn.k_proj.output_scale`, `self_attn.k_proj.k_scale`), and, older still, in one tensor for both
(`self_attn.kv_scale`).
"""

from __future__ import annotations

import re
from typing import Literal

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredKVScales
from pegboard_quant import compressed_tensors

_PAIRS = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("kv_scale", "kv_scale"),
)
_ATTENTION = re.compile(r"(?P<attention>.*\.layers\.(?P<layer>[0-9]{1,6})\.self_attn)\.(?P<key>.+)")


def compressed_kv_scales(facts: CheckpointFacts) -> tuple[StoredKVScales, ...]:
    """The KV scales of a compressed-tensors checkpoint; none if its config has no `kv_cache_scheme`.

    Raises:
        CheckpointError: as `find_kv_scales`, or the scheme is not of 8 bits.
    """
    kv = compressed_tensors.parse(facts).kv
    if kv is None:
        return ()
    if kv.bits != 8:
        where = "quantization_config.kv_cache_scheme.num_bits"
        raise CheckpointError(where, f"{kv.bits}", allowed="8")
    return find_kv_scales(facts, "float8" if kv.kind == "float" else "int8")


def find_kv_scales(
    facts: CheckpointFacts, codes: Literal["float8", "int8"]
) -> tuple[StoredKVScales, ...]:
    """The scales of a checkpoint, by rising layer.

    Args:
        facts: the checkpoint.
        codes: what they are for.

    Raises:
        CheckpointError: a layer has scales for keys and none for values, or the other way round.
    """
    keys: dict[tuple[int, str], set[str]] = {}
    for name in facts.tensors:
        found = _ATTENTION.fullmatch(name)
        if found is not None:
            keys.setdefault((int(found["layer"]), found["attention"]), set()).add(found["key"])
    scales = []
    for (layer, attention), held in sorted(keys.items()):
        for k, v in _PAIRS:
            if k in held or v in held:
                scales.append(StoredKVScales(layer, codes, f"{attention}.{k}", f"{attention}.{v}"))
                break
    for one in scales:
        for name in (one.k, one.v):
            if name not in facts.tensors:
                raise CheckpointError(f"tensor {name}", f"missing in {facts.path}")
    return tuple(scales)
