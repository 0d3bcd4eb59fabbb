"""From a body's bytes to its values: strict JSON, within the operator's limits.

How much there is to build is counted on the bytes, before anything is built of them. Large bodies are
counted, parsed and validated by a thread, one at a time: others do not wait for them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from pegboard.config import LimitsConfig
from pegboard.errors import RequestError
from pegboard.server.failures import NO_OBJECT, ApiError, invalid
from pegboard.server.stream import ClientGone

Bytes = NDArray[np.uint8]
Bool = NDArray[np.bool_]

SMALL = 16 * 2**10
"""Bytes of a body that is read at once: handing it to a thread would take longer."""

PIECE = 2**18
"""Bytes that are looked at at once."""

_JSON = re.compile(r"application/([\w.-]+\+)?json", re.IGNORECASE)


class BodyReader:
    """Reads bodies within limits."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, "bodies")

    async def read(self, raw: bytes, kind: type[BaseModel]) -> BaseModel:
        """The body of a request.

        Raises:
            ApiError: it is no JSON, over a limit, or has values that are wrong.
            RequestError: a field cannot be honoured.
        """
        if not raw:
            raise self._empty(kind)
        if len(raw) <= SMALL:
            return self._read(raw, kind)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._read, raw, kind)

    def _read(self, raw: bytes, kind: type[BaseModel]) -> BaseModel:
        self._check_size(raw)
        try:
            values = msgspec.json.decode(raw)
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
        except RecursionError:
            raise self._over("more nesting", "depth") from None
        values = self._without_nulls(values, self._limits.depth)
        try:
            return kind.model_validate(values, context=self._limits)
        except ValidationError as error:
            raise invalid(error.errors(include_url=False)) from None

    def _empty(self, kind: type[BaseModel]) -> ApiError:
        """The refusal of a missing body. It names the fields that an empty object would lack."""
        lacking: ApiError | RequestError = ApiError(400, "allowed: a JSON object")
        try:
            self._read(b"{}", kind)
        except (ApiError, RequestError) as error:
            lacking = error
        return ApiError(400, f"the body is empty; {lacking}", param=lacking.param)

    def _check_size(self, raw: bytes) -> None:
        num_keys, num_values = raw.count(b":"), _num_values(raw)
        if num_keys <= self._limits.keys and num_values <= self._limits.values:
            return
        # Some may stand in texts. To know that takes longer, and is seldom needed.
        num_keys = num_values = 0
        for piece, outside in _outside_texts(raw):
            num_keys += int(np.count_nonzero(outside & (piece == ord(":"))))
            num_values += int(np.count_nonzero(outside & _is_before_value(piece)))
            if num_keys > self._limits.keys:
                raise self._over(f"{num_keys} keys or more", "keys")
            if num_values > self._limits.values:
                raise self._over(f"{num_values} values or more", "values")

    def _without_nulls(self, value: Any, depth: int) -> Any:
        """The value without its null keys, at any depth. Null means absence: clients write it for fields
        that they leave out, and send messages of an answer back as they got them."""
        if not isinstance(value, list | dict):
            return value
        if not depth:
            raise self._over("more nesting", "depth")
        if isinstance(value, list):
            return [self._without_nulls(v, depth - 1) for v in value]
        return {key: self._without_nulls(v, depth - 1) for key, v in value.items() if v is not None}

    def _over(self, what: str, setting: str) -> ApiError:
        allowed = self._limits.allowed(setting)
        return ApiError(400, f"the body has {what}; allowed: {allowed}")


class JsonRoute(APIRoute):
    """A route whose body is read by the application's `state.bodies`, a `BodyReader`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind: Any = self.body_field.field_info.annotation

        async def read_and_handle(request: Request) -> Response:
            # The bytes have no name here: they need not stay until the request has been answered.
            body = await request.app.state.bodies.read(await _received(request), kind)
            return await handle(_ReadRequest(request.scope, request.receive, body))

        return read_and_handle


async def _received(request: Request) -> bytes:
    """The bytes of a body, which were sent as JSON.

    Raises:
        ClientGone: not all of them came.
        ApiError: they were sent as something else.
    """
    try:
        raw = b"".join([piece async for piece in request.stream()])
    except ClientDisconnect:
        raise ClientGone from None
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if raw and not _JSON.fullmatch(content_type):
        raise ApiError(400, NO_OBJECT)
    return raw


class _ReadRequest(Request):
    """A request whose body has been read; FastAPI takes it as it is."""

    def __init__(self, scope: Any, receive: Any, read: BaseModel) -> None:
        super().__init__(scope, receive)
        self._read = read

    async def body(self) -> bytes:
        return b"{}"  # asked only whether there is one

    async def json(self) -> Any:
        return self._read


def _num_values(raw: bytes) -> int:
    """No fewer than the JSON values inside of others: each is the first of something, or follows a
    comma."""
    return sum(raw.count(mark) for mark in (b",", b"[", b"{"))


def _is_before_value(piece: Bytes) -> Bool:
    """Marks of `_num_values`."""
    marks: Bool = (piece == ord(",")) | (piece == ord("[")) | (piece == ord("{"))
    return marks


def _outside_texts(raw: bytes) -> Iterator[tuple[Bytes, Bool]]:
    """The body without escapes (uint8) and its parts outside of quotes. It comes in pieces, so that
    another thread may run after each."""
    in_text = escaped = False
    for at in range(0, len(raw), PIECE):
        piece = raw[at + escaped : at + PIECE].replace(b"\\\\", b"")
        escaped = piece.endswith(b"\\")
        data = np.frombuffer(piece.replace(b'\\"', b""), np.uint8)
        inside = np.logical_xor.accumulate(data == ord('"')) ^ in_text
        in_text = bool(inside[-1]) if len(inside) else in_text
        yield data, ~inside
