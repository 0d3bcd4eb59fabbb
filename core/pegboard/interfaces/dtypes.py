"""Element types by name, and what an element takes. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

FLOAT_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes an element, of the types in which a plain weight may come."""

ITEM_BYTES: Mapping[str, int] = {
    **FLOAT_BYTES,
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
"""Bytes an element, of every type that a tensor may have."""
