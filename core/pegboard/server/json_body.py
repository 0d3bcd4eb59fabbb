"""Bodies as strict JSON: no NaN, no half surrogates, no more depth than the parser bears."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute


class JsonRoute(APIRoute):
    """A route whose body is read by the rules of JSON, which Python's own parser does not keep."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return msgspec.json.decode(await self.body())
        except (msgspec.MsgspecError, RecursionError) as error:
            raise HTTPException(400, f"the body is not JSON: {error}") from None
