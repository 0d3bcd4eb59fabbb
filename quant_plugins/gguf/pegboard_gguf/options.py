"""The options of the `gguf` quantizer."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class GGUFOptions(BaseModel):
    """`quantizer: {name: gguf, options: {...}}`.

    Attributes:
        mode: `packed`: weights stay in the file's codes; `dequantize`: they are converted to the
            activation dtype, once, and kept in the cache; `auto`: packed where kernels that promise
            `row_invariant` run them, else dequantized.
        activations: of packed weights: `float`: inputs as they are; `int8`: inputs rounded to int8 by
            a scale of each token and 32 consecutive inputs, as llama.cpp does; `auto`: int8, or float
            where no kernel that promises `row_invariant` takes int8.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["auto", "packed", "dequantize"] = "auto"
    activations: Literal["auto", "int8", "float"] = "auto"

    @model_validator(mode="after")
    def _activations_do_something(self) -> Self:
        if self.mode == "dequantize" and self.activations == "int8":
            raise PydanticCustomError(
                "inactive", "activations: int8 is for packed weights, and mode is dequantize"
            )
        return self

    @property
    def keeps_codes(self) -> bool:
        """Whether weights stay in codes; `auto` that nobody settled does."""
        return self.mode != "dequantize"

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs of packed weights are rounded to int8; `auto` that nobody settled does."""
        return self.keeps_codes and self.activations != "float"
