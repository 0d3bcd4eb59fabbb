"""The options of the drafter `draft_model`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class DraftModelOptions(BaseModel):
    """`drafter.options`.

    Attributes:
        quantizer: of the draft model; `auto`: what its checkpoint says.
        sampling: how a request with a temperature is guessed: `noise` draws the guess by the noise that
            the answer's token is drawn by; `greedy` takes the likeliest token.
        min_confidence: a guess of likeliest tokens ends before it would be right, as a whole, with a
            lesser probability.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    quantizer: Annotated[str, Field(min_length=1)] = "auto"
    sampling: Literal["noise", "greedy"] = "noise"
    min_confidence: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.02
