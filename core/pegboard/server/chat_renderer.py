"""Renders chats in a process of their own, in bounded time."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pegboard.chat_template import ChatTemplate
from pegboard.errors import EngineError, RequestError
from pegboard.server.keys import without_keys
from pegboard.server.template_process import Chat, Rendered, Template

RENDER_S = 2.0
"""Most seconds for one conversation."""

START_S = 60.0
"""Most seconds until the process is there."""

logger = logging.getLogger("pegboard.server")


class ChatRenderer:
    """One process that renders one conversation at a time; it is started anew when it had to be
    stopped.

    Args:
        template: the model's.
        where: the checkpoint, for errors.
        render_s: most seconds for one conversation.
    """

    def __init__(self, template: ChatTemplate, where: str, render_s: float = RENDER_S) -> None:
        self._start = Template(template.source, template.special_tokens, where)
        self._render_s = render_s
        self._process: Process | None = None
        self._warming: asyncio.Future[None] | None = None
        self._turn = asyncio.Lock()

    def start(self) -> None:
        """Begins to start the process, ahead of the first conversation."""
        self._warming = asyncio.ensure_future(self._warm_up())

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_bytes: int,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt of a conversation.

        Raises:
            RequestError: the template refuses the messages, or takes too long or too much memory.
            EngineError: there is no process.
        """
        chat = Chat([dict(message) for message in messages], add_generation_prompt, max_bytes)
        # An answer that nobody waits for any more must be read all the same.
        rendered = await asyncio.shield(asyncio.ensure_future(self._exchange(chat)))
        if rendered.refusal is not None:
            raise RequestError("messages", rendered.refusal)
        return rendered.text

    async def stop(self) -> None:
        """Ends the process. Idempotent."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        await self._end()

    async def _warm_up(self) -> None:
        try:
            async with self._turn:
                await self._running()
        except EngineError as error:
            logger.warning("%s; it will be tried again", error)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _exchange(self, chat: Chat) -> Rendered:
        async with self._turn:
            process = await self._running()
            try:
                async with asyncio.timeout(self._render_s):
                    return await _ask(process, chat)
            except TimeoutError:
                refusal = f"the model's chat template takes over {self._render_s:g} s for them"
            except (OSError, asyncio.IncompleteReadError):
                refusal = "the model's chat template ends its process with them"
            logger.warning("the chat template's process is started anew: %s", refusal)
            await self._end()
            return Rendered(refusal=refusal)

    async def _running(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        module = f"{__package__}.template_process"
        command = (sys.executable, "-P", "-m", module, str(os.getpid()))
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, env=without_keys(os.environ)
        )
        try:
            async with asyncio.timeout(START_S):
                await _ask(self._process, self._start)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            await self._end()
            raise EngineError("the chat template's process does not start") from error
        return self._process


async def _ask(process: Process, message: Template | Chat) -> Rendered:
    assert process.stdin is not None and process.stdout is not None
    payload = msgspec.msgpack.encode(message)
    process.stdin.write(len(payload).to_bytes(4, "little") + payload)
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(4), "little")
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=Rendered)
