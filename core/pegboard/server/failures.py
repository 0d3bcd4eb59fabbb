"""Errors as the OpenAI API shows them: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from pegboard.errors import EngineDied, EngineError, RequestError, UserError

NO_OBJECT = "the body must be a JSON object, sent as content-type application/json"

MAX_MISTAKES = 10
MAX_SHOWN = 200
"""Characters of a refusal. A refused body can be megabytes long; the answer does not repeat it."""

RETRY_AFTER = {"retry-after": "1"}
"""Headers of each request that is refused with 503 and states no others."""


def shown(text: str) -> str:
    """A client's text as a message shows it: short, in quotes, no control characters."""
    return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...")


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one line.
        param: the request's field that is wrong.
        code: machine-readable, where clients know one.
        headers: of the answer; without any, 503 says when to come again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or (RETRY_AFTER if status == 503 else {}))

    def body(self) -> ErrorBody:
        kind = _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return ErrorBody(ErrorDetail(str(self), kind, self.param, self.code))

    def response(self) -> Response:
        return _ErrorResponse(self)


class _ErrorResponse(Response):
    """An error as an answer; its message becomes the request's `state.refusal`, for the log."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(
            msgspec.json.encode(error.body()),
            status_code=error.status,
            headers=error.headers,
            media_type="application/json",
        )
        self._message = str(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["refusal"] = self._message
        await super().__call__(scope, receive, send)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


def as_api_error(error: Exception) -> ApiError:
    """The answer to a client for an exception of ours or a bug."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case UserError():
            return ApiError(400, str(error))
        case EngineDied():
            return ApiError(503, f"the engine died: {error}")
        case EngineError():
            return ApiError(500, str(error))
    return ApiError(500, "internal error; the server's log says more")


def install_handlers(app: FastAPI) -> None:
    """Makes every error of the application's routes an answer in the API's shape."""

    async def answer(_request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def answer_http(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    for kind in (ApiError, UserError, EngineError, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, answer_http)


def invalid(mistakes: Sequence[Mapping[str, Any]]) -> ApiError:
    """The refusal of a body in which pydantic found mistakes; the first few of them are told."""
    known = [_mistake(mistake) for mistake in mistakes[:MAX_MISTAKES]]
    lines = [f"{param}: {text}" if param else text for param, text in known]
    if len(mistakes) > MAX_MISTAKES:
        lines.append(f"and {len(mistakes) - MAX_MISTAKES} more")
    return ApiError(400, "; ".join(lines), param=known[0][0] or None)


def _mistake(mistake: Mapping[str, Any]) -> tuple[str, str]:
    """The field's dotted path, and what is wrong there."""
    path = ".".join(str(part)[:MAX_SHOWN] for part in mistake["loc"])
    match mistake["type"]:
        case "extra_forbidden":
            return path, "unknown field"
        case "missing":
            return path, "required"
        case "over_limit":
            return path, mistake["msg"]
        case "model_type" if not path:
            return "", NO_OBJECT
    message = str(mistake["msg"]).removeprefix("Value error, ")
    return path, f"{message}; got {reprlib.repr(mistake.get('input'))}"[:MAX_SHOWN]
