"""The options of the `gguf` quantizer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class GGUFOptions(BaseModel):
    """`quantizer: {name: gguf, options: {...}}`.

    Attributes:
        mode: `dequantize`: weights are converted to the activation dtype, once, and kept in the cache.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["dequantize"] = "dequantize"
