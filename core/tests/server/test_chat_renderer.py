"""The server's chats, one after the other, beside its loop."""

from __future__ import annotations

import asyncio

from pegboard.chat.renderer import ChatRenderer
from pegboard.server.chat_renderer import QueuedChatRenderer

ECHO = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_a_caller_that_leaves_does_not_disturb_the_next() -> None:
    async def use() -> None:
        renderer = QueuedChatRenderer(ChatRenderer(ECHO, {}, where="here"))
        await renderer.check()

        async def render(text: str) -> str:
            return await renderer.render([{"role": "user", "content": text}], max_bytes=100)

        for text in map(str, range(20)):
            leaving = asyncio.ensure_future(render(text))
            await asyncio.sleep(0)
            leaving.cancel()
            assert await render(text + "!") == f"user: {text}!\n"
        found = await asyncio.gather(*map(render, "abcdefgh"))
        assert found == [f"user: {text}\n" for text in "abcdefgh"]
        await renderer.stop()
        await renderer.stop()

    asyncio.run(use())
