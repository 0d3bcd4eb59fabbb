"""The options of the scheduler, as a config gives them under `scheduler.options`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """
    Attributes:
        max_wait: a request that arrived so many seconds before the newest one goes first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_wait: float = Field(10.0, ge=0)
