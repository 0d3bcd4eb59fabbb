"""The model as the server knows it: its name, its tokenizer, its context."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pegboard.errors import RequestError
from pegboard.server.failures import ApiError


class Tokenizer(Protocol):
    """What the server asks of the checkpoint's tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True)
class ServedModel:
    """
    Attributes:
        name: under which it is served.
        root: its reference in the config.
        created: when it was loaded, in seconds of Unix time.
        max_model_len: most tokens of a prompt and its answer together.
        fingerprint: of everything that decides its tokens.
        tokenizer: None: the checkpoint has none, and prompts are token ids.
    """

    name: str
    root: str
    created: int
    max_model_len: int
    fingerprint: str
    tokenizer: Tokenizer | None

    def check_name(self, name: str | None) -> None:
        """Raises ApiError 404 when a request asks for another model."""
        if name not in (None, self.name):
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist; served: {self.name}",
                param="model",
                code="model_not_found",
            )

    async def encode(self, prompt: str | list[int]) -> tuple[int, ...]:
        """The prompt's token ids. Raises RequestError for a text without a tokenizer."""
        if not isinstance(prompt, str):
            return tuple(prompt)
        tokenizer = self._need_tokenizer("prompt")
        return tuple(await asyncio.to_thread(tokenizer.encode, prompt))

    async def encode_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """The token ids of a conversation in the model's chat template.

        Raises:
            UserError: the model has no tokenizer or template, or its template refuses the messages.
        """
        tokenizer = self._need_tokenizer("messages")
        return tuple(await asyncio.to_thread(tokenizer.encode_chat, messages))

    def check_length(self, param: str, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Raises ApiError 400 when prompt and answer exceed the context."""
        num_tokens = num_prompt_tokens + (max_tokens or 1)
        if num_tokens > self.max_model_len:
            # Clients know an overflow by this sentence or by the code.
            raise ApiError(
                400,
                f"this model's maximum context length is {self.max_model_len} tokens, but "
                f"{num_tokens} were requested: {num_prompt_tokens} in the {param}, "
                f"{max_tokens or 1} in the completion; fix: shorten either",
                param=param,
                code="context_length_exceeded",
            )

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                param,
                "the model has no tokenizer",
                fix="send token ids to /v1/completions, with return_token_ids",
            )
        return self.tokenizer


class TokenTexts:
    """The text of single tokens, for logprobs; decoded once each."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """The token by itself; U+FFFD stands for a part of a character."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        if (text := self._texts.get(token_id)) is None:
            text = self._texts[token_id] = self._tokenizer.decode([token_id])
        return text

    def bytes(self, token_id: int) -> list[int] | None:
        """The token's UTF-8, None for a part of a character."""
        text = self.text(token_id)
        return None if "\ufffd" in text else list(text.encode())
