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

    def tenant(self, user: str | None) -> str:
        """Whose requests these are, for schedulers; "" when nothing tells them from others."""
        return self._typed(user)

    def cache_salt(self, salt: str | None) -> str:
        """Requests of the same salt share KV; "" when neither key nor client keeps them apart."""
        return self._typed(salt)

    def _typed(self, text: str | None) -> str:
        if self.key is None and not text:
            return ""
        return f"{'' if self.key is None else self.key}:{text or ''}"


def caller(http: Request) -> Caller:
    """The sender of a request that has passed `RequireKey`, if there are keys."""
    return Caller(getattr(http.state, "key", None))
