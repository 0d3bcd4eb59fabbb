"""Chats rendered one after the other, beside the server's loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from pegboard.chat.renderer import ChatRenderer
from pegboard.errors import EngineError

logger = logging.getLogger("pegboard.server")


class QueuedChatRenderer:
    """A thread that waits for the process in which conversations are rendered.

    Args:
        renderer: of the model's template; closed with this.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        # The kernel ends the process with the thread that started it: this one stays.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat-renderer")

    async def check(self) -> None:
        """Starts the process and tries the template. Cancelled, it ends at once, and the process with it.

        Raises:
            TokenizerError: see `ChatRenderer.check`.
        """
        checking = self._thread.submit(self._renderer.check)
        try:
            await asyncio.wrap_future(checking)
        except asyncio.CancelledError:
            while not checking.done():  # the process may not be there yet
                self._renderer.kill()
                await asyncio.sleep(0.01)
            raise
        except EngineError as error:
            logger.warning("%s; it will be tried again", error)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_bytes: int,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt of a conversation. One whose caller leaves before its turn is not rendered.

        Raises:
            RequestError: the template refuses the messages, or takes too long or too much memory.
            EngineError: there is no process.
        """
        render = partial(
            self._renderer.render,
            messages,
            max_bytes=max_bytes,
            add_generation_prompt=add_generation_prompt,
        )
        return await asyncio.get_running_loop().run_in_executor(self._thread, render)

    async def stop(self) -> None:
        """Ends process and thread. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._renderer.close)
