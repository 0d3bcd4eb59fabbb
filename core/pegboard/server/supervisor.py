"""The life of a server: socket, engine, HTTP, signals, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from pegboard.compose import Prepared, load_tokenizer, prepare, to_wire
from pegboard.config import Config, ServerConfig
from pegboard.config_values import shown
from pegboard.errors import ConfigError, EngineDied, EngineError, PegboardError
from pegboard.logs import configure_logging
from pegboard.server.app import Service, create_app
from pegboard.server.chat_renderer import QueuedChatRenderer
from pegboard.server.connection import BoundedConnection
from pegboard.server.daemon_thread import in_daemon
from pegboard.server.engine_client import EngineClient
from pegboard.server.engine_watch import EngineWatch
from pegboard.server.keys import Keys, read_keys
from pegboard.server.messages import Ready, Start
from pegboard.server.open_files import max_connections, raise_limit
from pegboard.server.places import Places
from pegboard.server.request_log import RequestLog
from pegboard.server.served_model import ServedModel
from pegboard.server.sites import is_loopback
from pegboard.server.sparse_log import SparseLog
from pegboard.server.startup_lines import log_settings

if TYPE_CHECKING:
    from pegboard.tokenizer import Tokenizer

DRAIN_S = 30.0
"""Seconds that open requests may go on after the first signal."""

ANSWERS_S = 5.0
"""Seconds that an ended answer may take to reach its client."""

UNREAD_MS = 60_000
"""Milliseconds that sent bytes may stay unread before the system closes the connection."""

MAX_HEADER_BYTES = 64 * 1024

BACKLOG = 2048
"""Connections that the system holds until they are taken."""

TAKEN_TOGETHER = 16
"""Connections that are taken from the system before any of them is looked at."""

NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger("pegboard.server")


def serve(config: Config) -> int:
    """Serves until SIGTERM or SIGINT; see `pegboard.server.run`."""
    configure_logging()
    keys = read_keys(config.server, os.environ)
    wanted = config.server.max_connections
    num_files = raise_limit()
    places = Places(max_connections(None if wanted == "auto" else wanted, num_files))
    with _listen(config.server.host, config.server.port) as listener:
        _check_allowed_hosts(config.server, keys, listener)
        prepared = prepare(config)
        log_settings(config)
        prepared.sampling_defaults.log(logger)
        logger.info("at most %d connections, %d open files", places.max_connections, num_files)
        return asyncio.run(_Supervisor(prepared, keys, listener, places).run())


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, and never far ahead of its connections.

    asyncio takes as many connections at once as it lets the system hold. Were they many, it would run out
    of files before the first of them could make another give way.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Supervisor:
    def __init__(
        self, prepared: Prepared, keys: Keys, listener: socket.socket, places: Places
    ) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._keys = keys
        self._listener = listener
        self._renderer: QueuedChatRenderer | None = None
        self._places = places
        self._no_files = SparseLog("connections not taken", max_lines=1, period_s=60.0)
        self._signalled = asyncio.Event()

    async def run(self) -> int:
        """The server's whole life: its exit status. Raises UserError when the engine cannot be built."""
        self._handle_signals(self._signalled.set)
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        server = self._config.server
        watch = EngineWatch(server.silence_s, server.deadline_s)
        self._engine = EngineClient(Start(to_wire(self._prepared)), watch)
        starting = asyncio.create_task(self._engine.start())
        try:
            if not await self._all_is_built(starting):
                return 0
            return await self._answer(starting)
        except EngineDied as error:
            logger.error("%s", error)
            return 1
        finally:
            if self._renderer is not None:
                await self._renderer.stop()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._engine.stop()
            logger.info("stopped")

    async def _all_is_built(self, starting: asyncio.Task[Ready]) -> bool:
        """Whether all parts were made before a signal came. What cannot be built is found before anybody
        is told that the server listens."""
        building = asyncio.create_task(self._build())
        signalled = asyncio.create_task(self._signalled.wait())
        waited: set[asyncio.Task[Any]] = {building, starting, signalled}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await asyncio.wait({building, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if not building.done():
                return False
            building.result()
            return True
        finally:
            building.cancel()
            signalled.cancel()
            await asyncio.gather(building, return_exceptions=True)

    async def _build(self) -> None:
        # The tokenizer is read while the engine's process starts.
        tokenizer = await in_daemon(load_tokenizer, self._prepared)
        if tokenizer is not None and tokenizer.chat is not None:
            self._renderer = QueuedChatRenderer(tokenizer.chat)
            await self._renderer.check()
        self._model = _served_model(self._prepared, tokenizer, self._renderer)
        await self._engine.built()

    async def _answer(self, starting: asyncio.Task[Ready]) -> int:
        self._service = Service(
            self._config.server,
            self._keys,
            self._model,
            self._engine,
            self._config.scheduler.max_num_seqs,
            on_loopback=is_loopback(self._listener.getsockname()[0]),
            log=RequestLog() if self._config.server.log_requests else None,
        )
        self._http = _HttpServer(_uvicorn_config(self._service, self._places))
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        self._handle_signals(self._on_signal)
        logger.info("loading %s; listening on %s", self._model.root, self._url())
        try:
            return await self._serve_until_the_end(starting)
        finally:
            self._service.draining = True
            self._http.should_exit = True
            await serving

    async def _serve_until_the_end(self, starting: asyncio.Task[Ready]) -> int:
        signalled = asyncio.create_task(self._signalled.wait())
        await asyncio.wait({starting, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return 0
        try:
            facts = starting.result()
        except EngineDied as error:
            return await self._bid_farewell(error, signalled)
        # Another composition runs when a kernel failed its self-test there.
        self._service.model = dataclasses.replace(
            self._model,
            max_model_len=facts.max_model_len,
            fingerprint=_fingerprint(facts.digest),
        )
        # What was loaded stays: collections that walked it would hold up the loop after large bodies.
        gc.collect()
        gc.freeze()
        logger.info("engine ready: pid=%d max_model_len=%d", facts.pid, facts.max_model_len)
        logger.info("Application startup complete.")
        logger.info("Uvicorn running on %s (Press CTRL+C to quit)", self._url())
        ended = asyncio.create_task(self._engine.ended())
        await asyncio.wait({ended, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return await self._bid_farewell(ended.result(), signalled)
        ended.cancel()
        logger.info("shutting down: %d requests are open", self._engine.num_open)
        asyncio.get_running_loop().call_later(DRAIN_S, self._end_answers)
        return 0

    async def _bid_farewell(self, error: PegboardError, signalled: asyncio.Task[Any]) -> int:
        """Says for a while why the engine is gone, to those who ask before they come back."""
        logger.error("%s", error)
        await asyncio.wait({signalled}, timeout=self._config.server.farewell_s)
        signalled.cancel()
        self._give_up_after(ANSWERS_S)
        return 1

    def _handle_signals(self, handle: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, handle)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Warns if the system lacks files, whoever holds them; asyncio tries again each second."""
        error = context.get("exception")
        is_accept = "accept" in context["message"]
        if is_accept and isinstance(error, OSError) and error.errno in NO_FILES:
            self._no_files.warn("a connection cannot be taken: %s", error.strerror)
        else:
            loop.default_exception_handler(context)

    def _on_signal(self) -> None:
        """The first signal lets open requests finish; the second does not."""
        if self._signalled.is_set():
            self._end_answers()
        self._signalled.set()

    def _end_answers(self) -> None:
        self._engine.fail_open(EngineError("the server is shutting down"))
        self._give_up_after(ANSWERS_S)

    def _give_up_after(self, seconds: float) -> None:
        def give_up() -> None:
            self._http.force_exit = True

        asyncio.get_running_loop().call_later(seconds, give_up)

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _check_allowed_hosts(config: ServerConfig, keys: Keys, listener: socket.socket) -> None:
    """Raises ConfigError when no request is held to the names that the server may be called by."""
    address = listener.getsockname()[0]
    if config.allowed_hosts and (keys.api or not is_loopback(address)):
        why = "with server.api_keys" if keys.api else f"on {address}"
        raise ConfigError(
            "server.allowed_hosts",
            f"{shown(config.allowed_hosts)}, but {why} a request may bear any name",
            fix="leave it out",
        )


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("server.host", f"{host}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by its connections
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        listener.bind(address)
        # Only a listening socket keeps another server from the same address.
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            "server.port",
            f"{host}:{port} cannot be bound: {error.strerror}",
            fix="choose another with --port, or 0 for any free one",
        ) from None
    return listener


def _served_model(
    prepared: Prepared, tokenizer: Tokenizer | None, renderer: QueuedChatRenderer | None
) -> ServedModel:
    composition = prepared.composition
    return ServedModel(
        names=prepared.config.served_names,
        root=prepared.config.model,
        created=int(time.time()),
        vocab_size=composition.target.shape.vocab_size,
        max_model_len=composition.max_model_len,
        fingerprint=_fingerprint(composition.digest),
        tokenizer=tokenizer,
        renderer=renderer,
        limits=prepared.config.server.limits,
        sampling_defaults=prepared.sampling_defaults,
    )


def _fingerprint(digest: str) -> str:
    return f"fp_{digest[:12]}"


def _uvicorn_config(service: Service, places: Places) -> uvicorn.Config:
    keep_alive_s = service.config.keep_alive_s
    return uvicorn.Config(
        create_app(service),
        http=cast(Any, functools.partial(BoundedConnection, places=places, log=service.log)),
        ws="none",  # a request to change the protocol is answered as if it had not asked
        backlog=TAKEN_TOGETHER,
        log_config=None,
        log_level=logging.ERROR,  # its warnings are of single requests, which are told of elsewhere
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=keep_alive_s,
        headers=[] if keep_alive_s else [("connection", "close")],
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
