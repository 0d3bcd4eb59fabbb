"""The middleware that each HTTP request passes before its route: body size, counters."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pegboard.server.failures import ApiError
from pegboard.server.request_log import RequestLog


class LimitBody:
    """Refuses bodies over a number of bytes with 413, whether or not they state their length; and with
    503 those that come while others, not read yet, fill the memory meant for all."""

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
        num_bytes, is_whole = 0, False

        async def receive_limited() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:  # what is waited for next is the client's leave: the body has been read
                self._num_held -= num_bytes
                num_bytes = 0
            message = await receive()
            added = len(message.get("body", b""))
            num_bytes += added
            self._num_held += added
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._refusal())
            if self._num_held > self._max_together:
                raise HTTPException(503, "too many bodies are being read")
            is_whole = not message.get("more_body", False)
            return message

        try:
            return await self._app(scope, receive_limited, send)
        finally:
            self._num_held -= num_bytes

    def _refusal(self) -> str:
        allowed = f"at most {self._max_bytes} bytes (server.limits.body)"
        return f"the body is too large; allowed: {allowed}"


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


class WatchRequests:
    """Counts requests, and has the log tell of them; one whose client went before its status has 499."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, log: RequestLog | None) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope.setdefault("state", {})  # one for all that see the request
        status = 499
        started = time.perf_counter()

        async def send_watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with self._metrics.open.track_inprogress():
                await self._app(scope, receive, send_watched)
        except Exception:
            status = 500 if status == 499 else status  # it is answered further out
            raise
        finally:
            seconds = time.perf_counter() - started
            # The path as clients wrote it would make a series each.
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(seconds)
            if self._log is not None:
                self._log.ended(scope, status, seconds)
            # An idle connection keeps its scope; the request in it is not needed any more.
            scope["state"].clear()
