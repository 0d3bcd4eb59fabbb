"""Access by key: users, and admins for the routes that concern all clients."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pegboard.server.failures import ApiError
from pegboard.server.keys import Keys

PUBLIC_PATHS = frozenset({"/health", "/live", "/ready"})
"""Probes carry no key."""


class RequireKey:
    """Lets a request through when it carries one of the keys, as bearer token or `x-api-key`.

    The number of the key becomes the request's `state.key`, those of admins after those of users, and
    `state.is_admin` says which it is. Where there are admins' keys alone, everybody is let through.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys.all]
        self._num_users = len(keys.api)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            return await self._app(scope, receive, send)
        number = self._number(Headers(scope=scope))
        if number is None and self._num_users:
            return await _key_wanted().response()(scope, receive, send)
        state = scope.setdefault("state", {})
        state["is_admin"] = number is not None and number >= self._num_users
        if self._num_users:
            state["key"] = number
        return await self._app(scope, receive, send)

    def _number(self, headers: Headers) -> int | None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Headers are decoded as Latin-1; encoding them again gives the bytes that were sent. Some bytes of
        # other characters look like Latin-1 spaces, so only the spaces of HTTP are stripped.
        key = token.strip(" \t") if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        given = _digest(key.encode("latin-1"))
        # Compares with every key, so that the time taken says nothing.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return matches.index(True) if any(matches) else None


def admin_only(keys: Keys) -> Callable[[Request], Awaitable[None]]:
    """The dependency of a route that concerns all clients: an admin's key, if there are any keys."""

    async def check(http: Request) -> None:
        if not keys.all or getattr(http.state, "is_admin", False):
            return
        if not keys.api:
            raise _key_wanted()
        known = (
            "a key of server.admin_keys" if keys.admin else "server.admin_keys, which is not set"
        )
        raise ApiError(403, f"{http.url.path} concerns all clients; it needs {known}")

    return check


def _key_wanted() -> ApiError:
    return ApiError(
        401,
        "the API key is missing or wrong; fix: send it as `Authorization: Bearer KEY`",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
