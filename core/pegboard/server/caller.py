"""The client behind a request, by which the tenants of one server are kept apart."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request


@dataclass(frozen=True, slots=True)
class Caller:
    """A client, as far as the server knows it.

    A client's text never names another key's tenant or salt: the key's number stands before the first
    colon, the text behind it.

    Attributes:
        key: number of the API key that let it in; None: the server has no keys.
    """

    key: int | None = None

    def namespaced(self, text: str | None) -> str:
        """The client's user or cache salt as the engine gets it; "" when neither key nor text tells its
        requests from others."""
        if self.key is None and not text:
            return ""
        return f"{'' if self.key is None else self.key}:{text or ''}"


def caller(http: Request) -> Caller:
    """The sender of a request that has passed `RequireKey`, if there are keys."""
    return Caller(getattr(http.state, "key", None))
