"""What every HTTP request passes before a route: the key, the size of its body, the counters."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pegboard.server.failures import RETRY_AFTER, ApiError

PUBLIC_PATHS = frozenset({"/health", "/live", "/ready"})
"""Probes carry no key; everything else needs one."""


class RequireKey:
    """Lets a request through when it carries one of the keys, as bearer token or `x-api-key`.

    The number of the key becomes the request's `state.key`.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            return await self._app(scope, receive, send)
        number = self._number(Headers(scope=scope))
        if number is None:
            refusal = ApiError(
                401,
                "the API key is missing or wrong; fix: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            return await refusal.response()(scope, receive, send)
        scope.setdefault("state", {})["key"] = number
        return await self._app(scope, receive, send)

    def _number(self, headers: Headers) -> int | None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Headers were decoded as Latin-1; the bytes are what was sent.
        given = _digest(key.encode("latin-1"))
        # Compares with every key, so that the time taken says nothing.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return matches.index(True) if any(matches) else None


class LimitBody:
    """Refuses bodies over a number of bytes with 413, whether or not they state their length; and with
    503 those that come while others fill the memory meant for all."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_together: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_together = max_together
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        stated = Headers(scope=scope).get("content-length", "0")
        if not stated.isdigit() or int(stated) > self._max_bytes:
            return await ApiError(413, self._refusal()).response()(scope, receive, send)
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            added = len(message.get("body", b""))
            num_bytes += added
            self._num_held += added
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._refusal())
            if self._num_held > self._max_together:
                raise HTTPException(503, "too many bodies are being read", headers=RETRY_AFTER)
            return message

        try:
            return await self._app(scope, receive_limited, send)
        finally:
            self._num_held -= num_bytes

    def _refusal(self) -> str:
        return f"the body is too large; allowed: at most {self._max_bytes} bytes"


class HttpMetrics:
    """Counters of the server's own, in the registry that it is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "pegboard_http_requests_total",
            "HTTP requests by route and status",
            ("route", "status"),
            registry=registry,
        )
        self.seconds = Histogram(
            "pegboard_http_request_seconds",
            "From the request's headers to the end of its answer",
            ("route",),
            buckets=(0.005, 0.025, 0.1, 0.25, 1, 2.5, 10, 30, 120, 600),
            registry=registry,
        )
        self.open = Gauge(
            "pegboard_http_requests_open", "HTTP requests in flight", registry=registry
        )


class CountRequests:
    """Counts requests; one whose client went before its status counts as 499."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = 499
        started = time.perf_counter()

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with self._metrics.open.track_inprogress():
                await self._app(scope, receive, send_counted)
        finally:
            # The path as clients wrote it would make a series each.
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - started)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
