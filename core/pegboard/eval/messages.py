"""The messages between a measured engine's process and the command: a JSON object a line."""

from __future__ import annotations

from typing import Any

import msgspec


class Start(msgspec.Struct, frozen=True):
    """The config to run, as nested values."""

    config: dict[str, Any]


class Memory(msgspec.Struct, frozen=True):
    """Bytes of the process in memory, as the operating system counts them; None: it does not say.

    Attributes:
        before: with python and torch imported, and nothing loaded.
        now: at this moment.
        peak: the most there ever was.
    """

    before: int | None
    now: int | None
    peak: int | None


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The engine is ready, or `mistake` says in a line why not."""

    seconds: float = 0.0
    mistake: str | None = None


class Job(msgspec.Struct, frozen=True):
    """Prompts to run at once. Each is continued greedily by exactly so many tokens."""

    prompts: tuple[tuple[int, ...], ...]
    num_tokens: int


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job.

    Attributes:
        token_ids: generated, by prompt.
        first_s: seconds until every prompt had its first token.
        rest_s: seconds from then on.
        num_rest: tokens that came in them.
        memory: afterwards.
    """

    token_ids: tuple[tuple[int, ...], ...]
    first_s: float
    rest_s: float
    num_rest: int
    memory: Memory
