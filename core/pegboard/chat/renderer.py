"""Renders chats in a process of their own, in bounded time and memory."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pegboard.chat.process import Chat, Rendered, Template, read_frame, write_frame
from pegboard.errors import EngineError, RequestError, TokenizerError

RENDER_S = 2.0
"""Most seconds for one conversation."""

COMPILE_S = 20.0
"""Most seconds until a template is compiled, and tried."""

START_S = 60.0
"""Most seconds until the process is there."""

MAX_BYTES = 2**28
"""Most bytes of a prompt where the caller says none."""

_INHERITED = {"PATH", "HOME", "TMPDIR", "TZ", "LANG", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}
_INHERITED_PREFIXES = ("PYTHON", "LC_")
"""Variables that the process inherits: those that Python needs, and no secrets."""

logger = logging.getLogger("pegboard.chat")


class ChatRenderer:
    """One process that renders one conversation at a time; it is started by the first one, and anew
    when it had to be stopped. Threads may share a renderer.

    Args:
        source: the template, jinja2.
        special_tokens: `bos_token`, `eos_token`, ... to their texts; variables of the template.
        where: the checkpoint, for errors.
        render_s: most seconds for one conversation.
        compile_s: most seconds until the template is compiled, and tried.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        where: str,
        render_s: float = RENDER_S,
        compile_s: float = COMPILE_S,
    ) -> None:
        self._template = Template(source, dict(special_tokens), where)
        self._render_s = render_s
        self._compile_s = compile_s
        self._turn = threading.Lock()
        self._process: _Process | None = None
        self._reads_parts: tuple[str, ...] = ()

    def check(self) -> tuple[str, ...]:
        """Starts the process and tries the template.

        Returns:
            Roles whose contents the template reads as lists of parts alone.

        Raises:
            TokenizerError: it is no template, takes too long, or leaves out what a user says.
            EngineError: there is no process.
        """
        with self._turn:
            self._running()
            return self._reads_parts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        max_bytes: int = MAX_BYTES,
    ) -> str:
        """The prompt of a conversation; contents are given in a form that the template keeps.

        Raises:
            RequestError: the template refuses the messages, or takes too long or too much memory.
            TokenizerError: as `check`.
            EngineError: there is no process.
        """
        chat = Chat(
            [dict(message) for message in messages],
            None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt,
            max_bytes,
        )
        with self._turn:
            rendered = self._exchange(_encode(chat))
        if rendered.refusal is not None:
            raise RequestError("messages", rendered.refusal)
        return rendered.text

    def close(self) -> None:
        """Ends the process, after the conversation that it may be at. Idempotent; another call
        starts it again."""
        with self._turn:
            self._end()

    def kill(self) -> None:
        """Ends the process at once. A thread that waits for it gets an error."""
        process = self._process
        if process is not None:
            process.kill()

    def _exchange(self, chat: bytes) -> Rendered:
        while True:
            is_new = self._process is None or not self._process.is_running
            process = self._running()
            try:
                return process.ask(chat, self._render_s)
            except TimeoutError:
                refusal = f"the model's chat template takes over {self._render_s:g} s for them"
            except _ProcessEnded:
                if not is_new:  # something else may have ended it, before these came
                    continue
                refusal = "the model's chat template ends its process with them"
            except BaseException:
                self._end()  # its answer must not be taken for the next one's
                raise
            logger.warning("the chat template's process is started anew: %s", refusal)
            self._end()
            return Rendered(refusal=refusal)

    def _running(self) -> _Process:
        if self._process is not None and self._process.is_running:
            return self._process
        self._end()
        process = self._process = _Process()
        try:
            process.wait_for_start()
            tried = process.ask(_encode(self._template), self._compile_s)
        except TimeoutError:
            tried = Rendered(refusal=f"takes over {self._compile_s:g} s for a short chat")
        except _ProcessEnded:
            tried = Rendered(refusal="ends its process with a short chat")
        except BaseException:
            self._end()
            raise
        if tried.refusal is not None:
            self._end()
            fix = tried.fix or "give another with chat_template, or none: chat_template=none"
            where = f"{self._template.where}: chat template"
            raise TokenizerError(where, tried.refusal, fix=fix)
        self._reads_parts = tried.reads_parts
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


class _ProcessEnded(Exception):
    """The process is no more."""


class _Process:
    """A running `pegboard.chat.process`; it ends with this object at the latest."""

    def __init__(self) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
        }
        command = (sys.executable, "-P", "-m", "pegboard.chat.process", str(os.getpid()))
        self._pipes = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,  # a terminal's Ctrl-C is the parent's alone
        )
        self.end = weakref.finalize(self, _end, self._pipes)

    @property
    def is_running(self) -> bool:
        return self._pipes.poll() is None

    def kill(self) -> None:
        self._pipes.kill()

    def wait_for_start(self) -> None:
        """Raises EngineError when it does not start."""
        try:
            with _Deadline(self._pipes, START_S):
                self._receive()
        except (TimeoutError, _ProcessEnded) as error:
            raise EngineError("the chat template's process does not start") from error

    def ask(self, payload: bytes, seconds: float) -> Rendered:
        """Sends a message and waits for its answer.

        Raises:
            TimeoutError: it did not come in time; the process was ended.
            _ProcessEnded: it cannot come.
        """
        with _Deadline(self._pipes, seconds):
            try:
                assert self._pipes.stdin is not None
                write_frame(self._pipes.stdin, payload)
            except OSError as error:
                raise _ProcessEnded from error
            return self._receive()

    def _receive(self) -> Rendered:
        assert self._pipes.stdout is not None
        if (frame := read_frame(self._pipes.stdout)) is None:
            raise _ProcessEnded
        return msgspec.msgpack.decode(frame, type=Rendered)


@dataclass
class _Deadline:
    """Ends a process that has not answered in time. The thread that waits for the answer then finds
    the pipe closed, and gets a TimeoutError."""

    process: subprocess.Popen[bytes]
    seconds: float
    _passed: bool = False
    _timer: threading.Timer = field(init=False)

    def __enter__(self) -> None:
        self._timer = threading.Timer(self.seconds, self._pass)
        self._timer.daemon = True
        self._timer.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._timer.cancel()
        if self._passed and isinstance(error, _ProcessEnded):
            raise TimeoutError from error

    def _pass(self) -> None:
        self._passed = True
        self.process.kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was not read any more
            pipe.close()


def _encode(message: Template | Chat) -> bytes:
    """Raises RequestError for values that no message can hold."""
    try:
        return msgspec.msgpack.encode(message)
    except UnicodeEncodeError:
        raise RequestError("messages", "they hold half of a surrogate pair") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(
            "messages", str(error), allowed="texts, numbers, lists and mappings, not deeply nested"
        ) from None
