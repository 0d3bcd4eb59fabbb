"""Request parameters of the built-in logits processors. Does not import torch: the host validates."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, model_validator

_Penalty = Annotated[FiniteFloat, Field(ge=-2.0, le=2.0)]


class PenaltiesParams(BaseModel, extra="forbid"):
    """Parameters of `penalties`.

    Attributes:
        repetition_penalty: factor against tokens of prompt and output (Keskar et al. 2019); 1: off.
        presence_penalty: subtracted once from tokens already generated.
        frequency_penalty: subtracted for each time a token was generated.
    """

    repetition_penalty: Annotated[FiniteFloat, Field(gt=0.0, le=100.0)] = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0


class LogitBiasParams(BaseModel, extra="forbid"):
    """Parameters of `logit_bias`.

    Attributes:
        logit_bias: token id to a number added to its logit.
    """

    logit_bias: dict[NonNegativeInt, FiniteFloat] = {}


class MinTokensParams(BaseModel, extra="forbid"):
    """Parameters of `min_tokens`.

    Attributes:
        min_tokens: tokens before which nothing that ends the sequence may be sampled.
        stop_token_ids: ids that end the sequence, beside the model's end-of-sequence ids.
        ignore_eos: those do not end it.
    """

    min_tokens: NonNegativeInt = 0
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_has_no_effect(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("min_tokens") in (None, 0):
            return {k: v for k, v in values.items() if k not in ("stop_token_ids", "ignore_eos")}
        return values
