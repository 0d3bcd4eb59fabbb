"""The routes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal, TypeVar, get_args

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from pegboard.config import ServerConfig
from pegboard.engine.breaker import CutOff
from pegboard.errors import RequestError
from pegboard.request import Request as EngineRequest
from pegboard.request import SequenceDelta
from pegboard.server.access import RequireKey, admin_only
from pegboard.server.call import Call, gather
from pegboard.server.caller import caller
from pegboard.server.chat import chat_call, chat_chunks, chat_reply
from pegboard.server.completions import completion_call, completion_chunks, completion_reply
from pegboard.server.engine_client import EngineClient
from pegboard.server.failures import ApiError, install_handlers
from pegboard.server.json_body import BodyReader, JsonRoute
from pegboard.server.keys import Keys
from pegboard.server.middleware import HttpMetrics, LimitBody, WatchRequests
from pegboard.server.protocol import ChatBody, CompletionBody
from pegboard.server.replies import Chunk, ModelCard, ModelList, Usage
from pegboard.server.request_log import RequestLog
from pegboard.server.served_model import ServedModel, TokenTexts
from pegboard.server.sites import RefuseOtherSites
from pegboard.server.stream import ClientGone, EventStream, while_connected
from pegboard.server.submission import Submission
from pegboard.server.tokenizing import DetokenizeBody, TokenizeBody, detokenize, tokenize
from pegboard.server.turns import TakeTurns
from pegboard.server.waiting import num_sequences, num_tokens

State = Literal["loading", "ready", "draining", "silent", "dead"]

Reply = Callable[[Call, Sequence[SequenceDelta], Usage, TokenTexts], msgspec.Struct]
Chunks = Callable[[Call, Submission, TokenTexts], AsyncIterator[Chunk]]

Handler = TypeVar("Handler", bound=Callable[..., Any])

BODIES_TOGETHER = 32
"""So many of the largest bodies may be in memory at a time."""

MIN_WAITING_TOKENS = 2**20
"""So many may wait unless the operator says otherwise, however little can run."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Service:
    """The parts that the routes share.

    Attributes:
        keys: that clients and admins need.
        max_num_seqs: most sequences that the engine runs at once.
        on_loopback: whether it listens on a loopback address.
        log: of requests; None: they are not logged.
        draining: no new requests are taken, open ones may finish.
    """

    config: ServerConfig
    keys: Keys
    model: ServedModel
    engine: EngineClient
    max_num_seqs: int
    on_loopback: bool = False
    log: RequestLog | None = None
    draining: bool = False
    texts: TokenTexts = field(init=False)
    _num_preparing: int = 0
    _replies: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "replies"), init=False
    )

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.model.tokenizer)

    @property
    def state(self) -> State:
        if self.engine.failure is not None:
            return "dead"
        if self.engine.silent is not None:
            return "silent"
        if self.draining:
            return "draining"
        return "loading" if self.engine.facts is None else "ready"

    @property
    def trouble(self) -> str | None:
        """The reason for which the engine is dead or silent; None: it is neither."""
        return str(self.engine.failure) if self.engine.failure else self.engine.silent

    def check_ready(self) -> None:
        """Raises ApiError 503 when no request can be taken now."""
        reason = {
            "loading": f"the model is loading ({self.engine.loaded:.0%})",
            "draining": "the server is shutting down",
            "silent": str(self.trouble),
            "dead": f"the engine died: {self.trouble}",
        }.get(self.state)
        if reason is not None:
            raise ApiError(503, reason)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """While a request is tokenized it takes a place in the queue.

        Raises:
            ApiError: 503, none can be taken now.
        """
        self.check_ready()
        self._check_queue(())
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    async def answer(self, http: Request, call: Call, reply: Reply) -> Response:
        """Runs a call, and answers with all of it."""
        submission = self._submit(http, call)
        try:
            answers, usage = await while_connected(http, gather(call, submission))
        finally:
            submission.close()

        def content() -> bytes:
            return msgspec.json.encode(reply(call, answers, usage, self.texts))

        if not call.may_be_large:
            return _json(content())
        # There may be many, which others' answers do not wait for.
        loop = asyncio.get_running_loop()
        return _json(await loop.run_in_executor(self._replies, content))

    async def stream(self, http: Request, call: Call, chunks: Chunks) -> Response:
        """Runs a call, and answers as it goes. A call that fails before its first token still gets
        a status of its own."""
        submission = self._submit(http, call)
        try:
            await while_connected(http, submission.first())
        except BaseException:
            submission.close()
            raise
        return EventStream(chunks(call, submission, self.texts), submission)

    def _submit(self, http: Request, call: Call) -> Submission:
        # The state may have changed while the prompts were tokenized.
        self.check_ready()
        self._check_queue(call.requests)
        submission = self.engine.submit(call.requests)
        http.state.submission = submission
        return submission

    def _check_queue(self, requests: Sequence[EngineRequest]) -> None:
        """Raises ApiError 503 when others wait, and requests cannot wait beside them; RequestError when
        they never can."""
        waiting, added = self.engine.waiting, num_tokens(requests)
        if added > self.max_waiting_tokens:
            raise RequestError(
                "prompt",
                f"{added} tokens of {num_sequences(requests)} sequences",
                allowed=f"at most {self.max_waiting_tokens} (server.limits.queue_tokens)",
            )
        # A request that is being prepared waits, too.
        waits = waiting.num_sequences + self._num_preparing + (num_sequences(requests) or 1)
        if waits > self.config.limits.queue:
            raise _queue_is_full("sequences", "queue")
        if waiting.num_tokens + added > self.max_waiting_tokens:
            raise _queue_is_full("tokens", "queue_tokens")

    @property
    def max_waiting_tokens(self) -> int:
        """Most tokens of the prompts of waiting sequences."""
        limit = self.config.limits.queue_tokens
        if limit != "auto":
            return limit
        return max(4 * self.max_num_seqs * self.model.max_model_len, MIN_WAITING_TOKENS)


def _queue_is_full(what: str, setting: str) -> ApiError:
    return ApiError(503, f"too many {what} are waiting (server.limits.{setting})")


def create_app(service: Service) -> FastAPI:
    """The application that serves a service."""
    app = FastAPI(title="Pegboard", version=version("pegboard"), docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    app.state.bodies = BodyReader(service.config.limits)
    registry = CollectorRegistry()
    _add_openai_routes(app, service)
    _add_tokenizer_routes(app, service)
    _add_operator_routes(app, service, registry)
    install_handlers(app)
    app.add_exception_handler(ClientGone, _client_gone)
    max_bytes = service.config.limits.body
    app.add_middleware(LimitBody, max_bytes=max_bytes, max_together=BODIES_TOGETHER * max_bytes)
    if service.keys.all:
        app.add_middleware(RequireKey, keys=service.keys)
    if not service.keys.api:
        hosts = service.config.allowed_hosts
        app.add_middleware(RefuseOtherSites, on_loopback=service.on_loopback, allowed_hosts=hosts)
    app.add_middleware(WatchRequests, metrics=HttpMetrics(registry), log=service.log)
    app.add_middleware(TakeTurns)
    return app


def _on_get(app: FastAPI, path: str, **settings: Any) -> Callable[[Handler], Handler]:
    """Answers GET, and HEAD with the same head. The schema has GET alone."""

    def add(handle: Handler) -> Handler:
        app.head(path, include_in_schema=False, **settings)(handle)
        return app.get(path, **settings)(handle)

    return add


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @_on_get(app, "/v1/models")
    async def models() -> Response:
        cards = [_card(service.model, name) for name in service.model.names]
        return _encoded(ModelList(data=cards))

    @_on_get(app, "/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _encoded(_card(service.model, service.model.named(name)))

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, http: Request) -> Response:
        with service.preparing():
            work = completion_call(body, service.model, caller(http))
            call = await while_connected(http, work)
        if body.stream:
            return await service.stream(http, call, completion_chunks)
        return await service.answer(http, call, completion_reply)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        with service.preparing():
            work = chat_call(body, service.model, caller(http))
            call = await while_connected(http, work)
        if body.stream:
            return await service.stream(http, call, chat_chunks)
        return await service.answer(http, call, chat_reply)


def _add_tokenizer_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize_text(body: TokenizeBody) -> Response:
        with service.preparing():
            return _encoded(await tokenize(body, service.model))

    @app.post("/detokenize")
    async def detokenize_ids(body: DetokenizeBody) -> Response:
        with service.preparing():
            return _encoded(await detokenize(body, service.model))


def _add_operator_routes(app: FastAPI, service: Service, registry: CollectorRegistry) -> None:
    age = Gauge(
        "pegboard_engine_metrics_age_seconds",
        "Since the engine's metrics below were made; NaN before the first",
        registry=registry,
    )
    up = Gauge("pegboard_engine_up", "1 while the engine takes requests", registry=registry)
    tasks = Gauge("pegboard_http_tasks", "Tasks of the server's event loop", registry=registry)
    admins = [Depends(admin_only(service.keys))]

    @_on_get(app, "/health")
    async def health() -> Response:
        """200 while the engine lives and says so; load balancers want `/ready`. What is wrong with it is
        said, and plugins that it does without for now are named, with what they did."""
        return _state(service, ("ready", "draining"), service.engine.status.cut_off)

    @_on_get(app, "/ready")
    async def ready() -> Response:
        return _state(service, ("ready",))

    @_on_get(app, "/live")
    async def live() -> Response:
        """200 while the server's own loop runs. The engine is not asked."""
        return _state(service, get_args(State))

    @_on_get(app, "/version")
    async def version() -> Response:
        return _encoded({"version": app.version})

    @app.post("/reset_prefix_cache", dependencies=admins)
    async def reset_prefix_cache() -> Response:
        """200 once no request can begin with KV computed before."""
        service.check_ready()
        await service.engine.reset_prefix_cache()
        return _encoded({"status": "ok"})

    @_on_get(app, "/metrics", dependencies=admins)
    async def metrics() -> Response:
        engine = service.engine
        up.set(service.state in ("ready", "draining"))
        tasks.set(len(asyncio.all_tasks()))
        known = engine.status_time
        age.set(float("nan") if known is None else time.monotonic() - known)
        text = generate_latest(registry).decode() + engine.status.metrics
        return Response(text, headers={"content-type": METRICS_TYPE})


def _state(
    service: Service, healthy: tuple[State, ...], cut_off: tuple[CutOff, ...] = ()
) -> Response:
    status = 200 if service.state in healthy else 503
    said: dict[str, object] = {"status": service.state}
    if service.trouble is not None:
        said["reason"] = service.trouble
    if cut_off:
        said["cut_off"] = cut_off
    return _encoded(said, status)


def _card(model: ServedModel, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=model.created, root=model.root, max_model_len=model.max_model_len
    )


def _encoded(answer: object, status: int = 200) -> Response:
    return _json(msgspec.json.encode(answer), status)


def _json(content: bytes, status: int = 200) -> Response:
    return Response(content, status, media_type="application/json")


async def _client_gone(_request: Request, _error: Exception) -> Response:
    # Nobody reads it; the status is for the counters.
    return Response(status_code=499)
