"""The block formats that stay packed, and the canonical form of each; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCALE_BYTES = 4
"""Scales and minima are float32: a K-quant's are products that float16 does not hold."""


@dataclass(frozen=True, slots=True)
class PackedForm:
    """A block format as codes of `LinearWeight`.

    Attributes:
        codes: kind of the codes.
        group_size: weights that share a scale.
        offset: what is beside the scales: `zeros`, `minima`, or nothing.
    """

    codes: Literal["uint4", "int8"]
    group_size: int
    offset: Literal["zeros", "minima"] | None = None

    def num_bytes(self, num_weights: int) -> int:
        """Memory of weights: codes at their bits, and their groups' numbers."""
        numbers = SCALE_BYTES * (1 if self.offset is None else 2)
        codes = num_weights // 2 if self.codes == "uint4" else num_weights
        return codes + num_weights // self.group_size * numbers


PACKED_FORMS = {
    "Q4_0": PackedForm("uint4", 32, "zeros"),
    "Q4_1": PackedForm("uint4", 32, "minima"),
    "Q5_0": PackedForm("int8", 32),
    "Q5_1": PackedForm("int8", 32, "minima"),
    "Q8_0": PackedForm("int8", 32),
    "Q4_K": PackedForm("uint4", 32, "minima"),
    "Q5_K": PackedForm("int8", 32, "minima"),
    "Q6_K": PackedForm("int8", 16),
}
"""Packed forms by ggml's names. Other types that the gguf library reads become floats."""
