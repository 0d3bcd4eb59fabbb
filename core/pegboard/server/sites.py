"""Keeps out requests that a browser sends for pages of other sites, if the server has no keys.

A page can post to any address that its reader's machine reaches; the browser names the page's site in
`Origin`. A page can also resolve its own name to a loopback address. Then it can read the answers too,
and only `Host` tells its requests from others.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pegboard.server.failures import ApiError, shown

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s\[\]:/?#@\\]+)(?::([0-9]{0,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_HARMLESS = ("GET", "HEAD", "OPTIONS")


class RefuseOtherSites:
    """Answers 403 to posts of other sites' pages, and to unknown names of a loopback address.

    Args:
        on_loopback: whether the server listens on a loopback address, so that its name must be one.
        allowed_hosts: other names that it may be called by, without a port.
    """

    def __init__(self, app: ASGIApp, *, on_loopback: bool, allowed_hosts: Sequence[str]) -> None:
        self._app = app
        self._on_loopback = on_loopback
        self._allowed = {_normal(host) for host in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            return await refusal.response()(scope, receive, send)
        return await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        place = _parse(host)
        if self._on_loopback and not (place and self._is_ours(place.host)):
            return ApiError(
                403,
                f"Host: {shown(host)}; allowed: localhost, a loopback address, or a name of"
                " server.allowed_hosts; fix: add it there, or set server.api_keys",
                code="host_not_allowed",
            )
        if scope["method"] not in _HARMLESS:
            for origin in headers.getlist("origin"):
                if place is None or not _is_origin_of(origin, place):
                    return ApiError(
                        403,
                        f"Origin: {shown(origin)}; allowed without keys: none, or that of the Host,"
                        f" {shown(host)}; fix: set server.api_keys",
                        code="origin_not_allowed",
                    )
        return None

    def _is_ours(self, host: str) -> bool:
        return host == "localhost" or host in self._allowed or is_loopback(host)


@dataclass(frozen=True)
class _Place:
    """A host, in its normal form, and a port; None: that of the scheme."""

    host: str
    port: int | None


def is_loopback(address: str) -> bool:
    """Whether a text is an IP address of a loopback device; a name is not."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _parse(authority: str) -> _Place | None:
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        return None
    return _Place(_normal(match[1]), int(match[2]) if match[2] else None)


def _normal(host: str) -> str:
    host = host.lower().removesuffix(".").removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def _is_origin_of(origin: str, place: _Place) -> bool:
    scheme, _, authority = origin.partition("://")
    default = _DEFAULT_PORTS.get(scheme.lower())
    other = _parse(authority)
    if default is None or other is None:
        return False
    return (other.host, other.port or default) == (place.host, place.port or default)
