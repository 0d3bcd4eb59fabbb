"""The options of the schedulers, as a config gives them under `scheduler.options`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PriorityOptions(BaseModel):
    """
    Attributes:
        max_wait: seconds of waiting that count as one class; None: classes stay as they are, and a
            low one may wait for ever.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_wait: Seconds | None = 60.0


class PrefixAwareOptions(BaseModel):
    """
    Attributes:
        window: so many of the oldest waiting sequences are compared.
        max_overtakes: so many younger sequences may be admitted before an older one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    window: Annotated[int, Field(ge=1)] = 64
    max_overtakes: Annotated[int, Field(ge=0)] = 64


class FairOptions(BaseModel):
    """
    Attributes:
        weights: tenant to its share; 1 for tenants not named.
        input_weight: what a prompt's token counts.
        output_weight: what an output token counts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: dict[str, Weight] = {}
    input_weight: Weight = 1.0
    output_weight: Weight = 2.0


class ShortestOptions(BaseModel):
    """
    Attributes:
        max_wait: no sequence is overtaken by one that arrived more than so many seconds after it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_wait: Seconds = 10.0
