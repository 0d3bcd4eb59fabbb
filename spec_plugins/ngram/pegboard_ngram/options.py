"""The options of the drafters, as a config gives them under `drafter.options`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_NGRAM = 16
MAX_TOKENS = 2**18
MAX_RECENT_TOKENS = 2**24

Ngram = Annotated[int, Field(ge=1, le=MAX_NGRAM)]
Tokens = Annotated[int, Field(ge=64, le=MAX_TOKENS)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class LookupOptions(BaseModel):
    """
    Attributes:
        max_tokens: most tokens of a row that are searched; where there are more, the older half is
            forgotten.
        min_confidence: a draft ends before it would be right, as a whole, with a lesser probability.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: Tokens = 8192
    min_confidence: Probability = 0.1


class NgramOptions(LookupOptions):
    """
    Attributes:
        prompt_lookup_min, prompt_lookup_max: least and most of the newest tokens that must have stood
            together before.
    """

    prompt_lookup_min: Ngram = 2
    prompt_lookup_max: Ngram = 4

    @model_validator(mode="after")
    def _is_a_range(self) -> NgramOptions:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min}; allowed: at most"
                f" prompt_lookup_max, {self.prompt_lookup_max}"
            )
        return self


class SuffixOptions(LookupOptions):
    """
    Attributes:
        min_match: least of the newest tokens that must have stood together before.
        recent_tokens: so many tokens of outputs that ended are searched too, each only by rows of the
            same tenant and cache salt; those of all of them together count. 0: none.
    """

    min_match: Annotated[int, Field(ge=1)] = 2
    recent_tokens: Annotated[int, Field(ge=0, le=MAX_RECENT_TOKENS)] = 0
